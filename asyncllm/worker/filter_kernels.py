"""Which tokens top-k, top-p and min-p leave of a row, and the one of them that is drawn.

Each filter keeps what is at least as likely as some token, so all of a row's are one cutoff, found
by bisection over the bits of float32. `summarise_block` reads the logits once, many programs to a
row, and leaves the largest of each GROUP of tokens. Then one program lists the groups that reach a
cutoff, a few dozen of thousands as a rule, and reads only their tokens, those of the first TILE
groups once. Where k groups reach a logit, k tokens do, so a top-k knows from the summary which
groups to list. A flat distribution takes more and longer passes, and no other code.

Likelihoods are added up as integers: what is kept follows from the row alone, whatever the order of
addition and the type of the logits. Ties at the cutoff all stay, as in sampler.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.worker.logit_kernels import gumbel_noise, load_logits

GROUP: tl.constexpr = tl.constexpr(64)  # tokens: 128 bytes of logits in half precision
TILE: tl.constexpr = tl.constexpr(32)  # groups that are read at once
SLACK: tl.constexpr = tl.constexpr(12)  # groups more than a top-k needs: usual ones fit a TILE
ONE: tl.constexpr = tl.constexpr(2.0**40)  # the weight of the most likely token
# Bits as an integer are a key in the order of floats. Half precision has neighbours 1 << 16 apart.
FIRST_STEP: tl.constexpr = tl.constexpr(8 << 16)  # down from a logit of 20 that is one
STEP_GROWTH: tl.constexpr = tl.constexpr(4)
LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**31))
KEY_OF_NOTHING: tl.constexpr = tl.constexpr(-0x7F800001)  # of -inf
NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def may_filter(temperature, top_k, top_p, min_p, vocab_size):
    """Whether these parameters can forbid a token."""
    return (temperature > 0) & (_by_rank(top_k, vocab_size) | (top_p < 1) | (min_p > 0))


@triton.jit
def _by_rank(top_k, vocab_size):
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def summarise_block(x, temperature, maxima_ptr):
    """The largest of each group of logits to `maxima_ptr`; returns log-sum-exp of all x / T."""
    groups: tl.constexpr = x.shape[0] // GROUP
    tl.store(maxima_ptr + tl.arange(0, groups), tl.max(tl.reshape(x, [groups, GROUP]), axis=1))
    top = tl.max(x, axis=0) / temperature
    weight = tl.sum(_weight(x, temperature, top), axis=0).to(tl.float32)
    return tl.where(top > float("-inf"), top + tl.log(weight / ONE), float("-inf"))


@triton.jit
def draw_filtered(
    row, maxima, listed_ptr, log_sums, best, temperature, top_k, top_p, min_p, seed, position, unit
):  # fmt: skip
    """(noisy logit, token) of the best of the tokens that the filters keep.

    row: as `load_logits` takes it. maxima: of its groups, -inf behind them; best: the largest of
    them, finite. listed_ptr: room for as many numbers. log_sums: what `summarise_block` returned.
    unit: by how much the keys of neighbouring logits differ.
    """
    _, vocab_size, _, _, _, _ = row
    top = best / temperature
    high = (_key(best) & -unit) + unit  # above all
    cutoff = best + temperature * tl.log(min_p)
    is_by_rank = _by_rank(top_k, vocab_size)
    if is_by_rank | (cutoff > float("-inf")):
        floor = cutoff
        if is_by_rank:
            floor = tl.maximum(_enough_groups(maxima, high, top_k, unit), cutoff)
        listed = _list_groups(row, maxima, listed_ptr, floor)
        if is_by_rank:
            low, target = _key(floor) & -unit, top_k.to(tl.float32)
            cutoff = _bisect(row, listed, temperature, top, cutoff, low, high, target, unit, True)
        low = _key(cutoff) & -unit
        target = top_p * _weigh(row, listed, temperature, top, cutoff, False)
    else:
        target = top_p * (tl.sum(tl.exp(log_sums - top), axis=0) * ONE)
        low, high, listed = _step_down(
            row, maxima, listed_ptr, temperature, top, high, target, unit
        )  # fmt: skip
    if top_p < 1:
        cutoff = _bisect(row, listed, temperature, top, cutoff, low, high, target, unit, False)
    return _best_of_listed(row, listed, temperature, cutoff, seed, position)


@triton.jit
def _enough_groups(maxima, high, num, unit):
    """A logit that at least `num` groups reach, and SLACK more where such is soon found; -inf where
    there are fewer. high: a key above all."""
    low = high * 0 + LOWEST_KEY
    count = num + SLACK + 1
    while (high - low > unit) & (count > num + SLACK):
        key = ((low + high) >> 1) & -unit
        reached = tl.sum((maxima >= _value(key)).to(tl.int32), axis=0)
        is_enough = reached >= num
        low = tl.where(is_enough, key, low)
        high = tl.where(is_enough, high, key)
        count = tl.where(is_enough, reached, count)
    return _value(low)


@triton.jit
def _step_down(row, maxima, listed_ptr, temperature, top, high, target, unit):
    """From the best token in growing steps, until what weighs `target` is left, or all: (key that
    is enough, one that is not, what is listed for the first)."""
    low = high - unit
    listed = _list_groups(row, maxima, listed_ptr, _value(low))
    step = high * 0 + FIRST_STEP
    while (_weigh(row, listed, temperature, top, _value(low), False) < target) & (low > LOWEST_KEY):
        high = low
        low = tl.maximum(low - step, LOWEST_KEY)
        step = tl.minimum(step * STEP_GROWTH, -LOWEST_KEY)
        listed = _list_groups(row, maxima, listed_ptr, _value(low))
    return low, high, listed


@triton.jit
def _bisect(
    row, listed, temperature, top, cutoff, low, high, target, unit, BY_RANK: tl.constexpr
):  # fmt: skip
    """The highest cutoff that leaves what weighs `target`; the given one where all weighs less.

    low: a key that is enough, or the given cutoff's, whose groups are listed; high: one that is
    not enough.
    """
    while high - low > unit:
        key = ((low + high) >> 1) & -unit
        floor = tl.maximum(_value(key), cutoff)
        weight = _weigh(row, listed, temperature, top, floor, BY_RANK)
        is_enough = (weight >= target) | (floor <= cutoff)
        low = tl.where(is_enough, key, low)
        high = tl.where(is_enough, high, key)
        if BY_RANK:  # exactly as many: no number between leaves fewer that would do
            high = tl.where(weight == target, key + unit, high)
    return tl.maximum(_value(low), cutoff)


@triton.jit
def _list_groups(row, maxima, listed_ptr, floor):
    """The groups that reach `floor`: where their numbers are, ascending; how many; the logits of
    the first TILE of them."""
    is_listed = (maxima >= floor) & (maxima > float("-inf"))
    place = tl.cumsum(is_listed.to(tl.int32), axis=0)
    tl.debug_barrier()  # all threads of this program are done with those before
    tl.store(listed_ptr + place - 1, tl.arange(0, maxima.shape[0]), is_listed)
    num_listed = tl.max(place, axis=0)
    tl.debug_barrier()  # and read these
    return listed_ptr, num_listed, load_logits(row, _listed_tokens(listed_ptr, 0, num_listed))


@triton.jit
def _listed_tokens(listed_ptr, start, num_listed):
    """[TILE, GROUP] of the listed groups from `start`, negative behind the last."""
    place = start + tl.arange(0, TILE)
    group = tl.load(listed_ptr + place, place < num_listed, other=-1)
    return group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _weigh(row, listed, temperature, top, floor, BY_RANK: tl.constexpr):
    """float32: how many tokens of the listed groups reach `floor`, or how likely they are."""
    listed_ptr, num_listed, x = listed
    total = _weights(x, temperature, top, floor, BY_RANK)
    for start in range(TILE, num_listed, TILE):
        x = load_logits(row, _listed_tokens(listed_ptr, start, num_listed))
        total += _weights(x, temperature, top, floor, BY_RANK)
    return tl.sum(tl.sum(total, axis=1), axis=0).to(tl.float32)


@triton.jit
def _weights(x, temperature, top, floor, BY_RANK: tl.constexpr):
    is_kept = (x >= floor) & (x > float("-inf"))
    if BY_RANK:
        return is_kept.to(tl.int64)
    return tl.where(is_kept, _weight(x, temperature, top), 0)


@triton.jit
def _weight(x, temperature, top):
    """int64, ONE for x / T = top."""
    likelihood = tl.exp(x / temperature - top)
    return (tl.where(x > float("-inf"), likelihood, 0.0) * ONE).to(tl.int64)


@triton.jit
def _best_of_listed(row, listed, temperature, cutoff, seed, position):
    listed_ptr, num_listed, x = listed
    best, best_token = _best_of_tile(x, listed, 0, temperature, cutoff, seed, position)
    for start in range(TILE, num_listed, TILE):
        x = load_logits(row, _listed_tokens(listed_ptr, start, num_listed))
        highest, first = _best_of_tile(x, listed, start, temperature, cutoff, seed, position)
        best_token = tl.where(highest > best, first, best_token)
        best = tl.maximum(best, highest)
    return best, best_token


@triton.jit
def _best_of_tile(x, listed, start, temperature, cutoff, seed, position):
    listed_ptr, num_listed, _ = listed
    token = _listed_tokens(listed_ptr, start, num_listed)
    score = x / temperature + gumbel_noise(token, seed, position)
    score = tl.where(x >= cutoff, score, float("-inf"))
    highest = tl.max(tl.max(score, axis=1), axis=0)
    return highest, tl.min(tl.min(tl.where(score == highest, token, NO_TOKEN), axis=1), axis=0)


@triton.jit
def _key(x):
    """int64 in the order of float32 `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(key):
    """float32 of this key, or -inf of one that none has."""
    bits = tl.maximum(key, KEY_OF_NOTHING).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
