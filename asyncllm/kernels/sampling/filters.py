"""Which tokens top-k, top-p and min-p leave of a row, and the one of them that is drawn.

Each filter keeps what is at least as likely as some token, so all of a row's are one cutoff, found
by bisection over the bits of float32. `summarise_block` reads the logits once, many programs to a
row, and leaves the largest of each GROUP of tokens. Then one program lists the groups that reach a
cutoff, a few dozen of thousands as a rule, and reads only their tokens as often as it must. Where k
groups reach a logit, k tokens do: a top-k finds by the summary alone which groups to list. A flat
distribution takes more and longer passes, and no other code.

Likelihoods are added up as integers: what is kept follows from the row alone, whatever the order of
addition and the type of the logits. Ties at the cutoff all stay, as in sampler.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.sampling.logits import gumbel_noise, load_logits

GROUP: tl.constexpr = tl.constexpr(64)  # tokens: 128 bytes of logits in half precision
TILE: tl.constexpr = tl.constexpr(32)  # groups that are read at once
CHUNK: tl.constexpr = tl.constexpr(1024)  # maxima that are read at once
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
def largest_of(maxima_ptr, num_groups):
    """The largest logit of a row."""
    largest = float("-inf")
    for start in range(0, num_groups, CHUNK):
        group = start + tl.arange(0, CHUNK)
        maxima = tl.load(maxima_ptr + group, group < num_groups, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(maxima, axis=0))
    return largest


@triton.jit
def draw_filtered(
    row, maxima_ptr, listed_ptr, num_groups, log_sums, best,
    temperature, top_k, top_p, min_p, seed, position, unit,
):  # fmt: skip
    """(noisy logit, token) of the best of the tokens that the filters keep.

    row: as `load_logits` takes it. maxima_ptr: of its groups; best: the largest of them, finite.
    listed_ptr: room for as many numbers. log_sums: what `summarise_block` returned. unit: by how
    much the keys of neighbouring logits differ.
    """
    groups = maxima_ptr, listed_ptr, num_groups
    top = best / temperature
    cutoff = best + temperature * tl.log(min_p)
    _, vocab_size, _, _, _, _ = row
    if _by_rank(top_k, vocab_size):
        target = top_k.to(tl.float32)
        floor = tl.maximum(_enough_groups(groups, best, target, unit), cutoff)
        num_listed = _list_groups(groups, floor)
        cutoff = _raise_cutoff(
            row, groups, num_listed, temperature, top, best, cutoff, floor, target, unit, True
        )
    if top_p < 1:
        total = tl.sum(tl.exp(log_sums - top), axis=0) * ONE
        num_listed = 0
        if cutoff > float("-inf"):
            num_listed = _list_groups(groups, cutoff)
            total = _weigh(row, listed_ptr, num_listed, temperature, top, cutoff, False)
        target = top_p * total
        cutoff = _raise_cutoff(
            row, groups, num_listed, temperature, top, best, cutoff, cutoff, target, unit, False
        )
    num_listed = _list_groups(groups, cutoff)
    return _best_of_listed(row, listed_ptr, num_listed, temperature, cutoff, seed, position)


@triton.jit
def _enough_groups(groups, best, num, unit):
    """A logit that at least `num` groups reach, and at most SLACK more where one parts them so.

    -inf where there are fewer.
    """
    maxima_ptr, _, num_groups = groups
    high = (_key(best) & -unit) + unit  # above all
    low = high * 0 + LOWEST_KEY
    count = num + (SLACK + 1)
    while (high - low > unit) & (count > num + SLACK):
        key = ((low + high) >> 1) & -unit
        floor = _value(key)
        reached = tl.zeros([CHUNK], tl.float32)
        for start in range(0, num_groups, CHUNK):
            group = start + tl.arange(0, CHUNK)
            maxima = tl.load(maxima_ptr + group, group < num_groups, other=float("-inf"))
            reached += tl.where(maxima >= floor, 1.0, 0.0)
        total = tl.sum(reached, axis=0)
        is_enough = total >= num
        low = tl.where(is_enough, key, low)
        high = tl.where(is_enough, high, key)
        count = tl.where(is_enough, total, count)
    return _value(low)


@triton.jit
def _raise_cutoff(
    row, groups, num_listed, temperature, top, best, cutoff, least, target, unit,
    BY_RANK: tl.constexpr,
):  # fmt: skip
    """The highest cutoff that leaves what weighs `target`; the given one where all weighs less.

    least: a logit that is enough, or the given cutoff, whose groups are listed; where it is -inf,
    first down from the best token in growing steps, until it is enough. Only what is as likely as
    that need be read for the rest, which is bisection.
    """
    _, listed_ptr, _ = groups
    high = (_key(best) & -unit) + unit  # above all
    is_stepping = least == float("-inf")
    low = tl.minimum(tl.where(is_stepping, high, _key(least) & -unit), high - unit)
    step = high * 0 + FIRST_STEP
    while is_stepping | (high - low > unit):
        key = tl.where(is_stepping, low, ((low + high) >> 1) & -unit)
        floor = tl.maximum(_value(key), cutoff)
        if is_stepping:
            num_listed = _list_groups(groups, floor)
        weight = _weigh(row, listed_ptr, num_listed, temperature, top, floor, BY_RANK)
        is_enough = (weight >= target) | (floor <= cutoff)
        high = tl.where(is_enough, high, key)
        if BY_RANK:  # exactly as many: no number between leaves fewer that would do
            high = tl.where(weight == target, key + unit, high)
        step_down = tl.maximum(low - step, LOWEST_KEY)
        low = tl.where(is_enough, key, tl.where(is_stepping, step_down, low))
        step = tl.minimum(step * STEP_GROWTH, -LOWEST_KEY)
        is_stepping = is_stepping & (is_enough == 0)
    return tl.maximum(_value(low), cutoff)


@triton.jit
def _list_groups(groups, floor):
    """Writes the numbers of the groups that reach `floor`, ascending; returns how many."""
    maxima_ptr, listed_ptr, num_groups = groups
    num_listed = 0
    for start in range(0, num_groups, CHUNK):
        group = start + tl.arange(0, CHUNK)
        maxima = tl.load(maxima_ptr + group, group < num_groups, other=float("-inf"))
        is_listed = (maxima >= floor) & (maxima > float("-inf"))
        place = tl.cumsum(is_listed.to(tl.int32), axis=0)
        tl.store(listed_ptr + num_listed + place - 1, group, is_listed)
        num_listed += tl.max(place, axis=0)
    tl.debug_barrier()  # other threads of this program read them
    return num_listed


@triton.jit
def _listed_tokens(listed_ptr, start, num_listed):
    """[TILE, GROUP] of the listed groups from `start`, negative behind the last."""
    place = start + tl.arange(0, TILE)
    group = tl.load(listed_ptr + place, place < num_listed, other=-1)
    return group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _weigh(row, listed_ptr, num_listed, temperature, top, floor, BY_RANK: tl.constexpr):
    """float32: how many tokens of the listed groups reach `floor`, or how likely they are."""
    total = tl.zeros([TILE, GROUP], tl.int64)
    for start in range(0, num_listed, TILE):
        x = load_logits(row, _listed_tokens(listed_ptr, start, num_listed))
        is_kept = (x >= floor) & (x > float("-inf"))
        if BY_RANK:
            total += is_kept.to(tl.int64)
        else:
            total += tl.where(is_kept, _weight(x, temperature, top), 0)
    return tl.sum(tl.sum(total, axis=1), axis=0).to(tl.float32)


@triton.jit
def _weight(x, temperature, top):
    """int64, ONE for x / T = top."""
    likelihood = tl.exp(x / temperature - top)
    return (tl.where(x > float("-inf"), likelihood, 0.0) * ONE).to(tl.int64)


@triton.jit
def _best_of_listed(row, listed_ptr, num_listed, temperature, cutoff, seed, position):
    best = float("-inf")
    best_token = 0
    for start in range(0, num_listed, TILE):
        token = _listed_tokens(listed_ptr, start, num_listed)
        x = load_logits(row, token)
        score = x / temperature + gumbel_noise(token, seed, position)
        score = tl.where(x >= cutoff, score, float("-inf"))
        highest = tl.max(tl.max(score, axis=1), axis=0)
        first = tl.min(tl.min(tl.where(score == highest, token, NO_TOKEN), axis=1), axis=0)
        best_token = tl.where(highest > best, first, best_token)
        best = tl.maximum(best, highest)
    return best, best_token


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
