"""Files that tests/kernels/test_triton.py runs in separate processes are not collected."""

collect_ignore_glob = ["gemm_*.py"]
