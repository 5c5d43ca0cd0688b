"""What is run by test_triton.py, in processes of their own, is not collected beside it."""

collect_ignore_glob = ["triton_*.py"]
