"""Flags by what they are about, for `--help=GROUP`. A test holds every flag to one group."""

from __future__ import annotations

OTHER = "other"  # of flags that are in none, which a test forbids
# Group -> what it is about, and the fields of `EngineArgs` and `ServerArgs` in it.
GROUPS: dict[str, tuple[str, str]] = {
    "model": ("which model, under which name, how much of it", """
        model revision download_dir tokenizer skip_tokenizer_init served_model_name model_impl
        max_model_len dtype load_format quantization
        """),
    "chat": ("templates, reasoning, tool calls", """
        chat_template chat_template_content_format default_chat_template_kwargs
        trust_request_chat_template escape_special_tokens response_role reasoning_parser
        tool_call_parser enable_auto_tool_choice exclude_tools_when_tool_choice_none
        """),
    "answers": ("sampling defaults, and what answers hold", """
        generation_config override_generation_config seed max_logprobs logits_processors
        structured_outputs_config stream_interval enable_force_include_usage
        enable_prompt_tokens_details return_tokens_as_token_ids
        """),
    "adapters": ("LoRA", """
        enable_lora lora_modules max_loras max_lora_rank max_cpu_loras
        lora_modules_to_save allow_runtime_lora_updating lora_root
        """),
    "memory": ("the device's memory and the KV cache", """
        gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override block_size
        enable_prefix_caching swap_space kv_cache_dtype calculate_kv_scales
        """),
    "scheduling": ("how many requests run and wait, in which order", """
        max_num_seqs max_num_batched_tokens chunked_prefill_size scheduling_policy preemption_mode
        async_scheduling max_queued_requests max_queued_tokens max_queue_seconds
        """),
    "device": ("kernels, CUDA graphs, the watchdog", """
        device attention_backend enforce_eager cuda_graph_sizes prefill_graph_sizes watchdog_timeout
        """),
    "ranks": ("several devices for one model", """
        tensor_parallel_size pipeline_parallel_size enable_expert_parallel
        distributed_timeout_seconds distributed_executor_backend
        nnodes master_addr master_port join_secret_file
        data_parallel_size data_parallel_backend data_parallel_rank
        """),
    "server": ("where it listens, limits, the page", """
        host port uds root_path ssl_certfile ssl_keyfile max_connections max_body_bytes
        responses_store_bytes shutdown_timeout middleware disable_page
        """),
    "access": ("who may call: keys, hosts, other sites' pages", """
        api_key public_metrics allowed_hosts allowed_origins allowed_methods allowed_headers
        allow_credentials enable_tokenizer_info_endpoint
        """),
    "logs": ("logs, metrics, traces", """
        log_level log_format enable_log_requests disable_log_stats enable_request_id_headers
        metrics_prefix otlp_traces_endpoint
        """),
}  # fmt: skip
