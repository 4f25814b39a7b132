F="launcher/affinity.py launcher/topology.py $(ls tests/*/test_affinity*.py tests/*/test_topology*.py tests/contract/test_numa_like_torch.py 2>/dev/null)"
.venv/bin/ruff format $F; .venv/bin/ruff check $F; .venv/bin/mypy $F 2>&1 | tail -20
