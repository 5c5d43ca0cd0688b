"""``import dynorm`` before or after transformers, without it, or with another one."""

from __future__ import annotations

import json
from pathlib import Path

from dynorm.hub import save
from tests.hub.folders import fresh
from tests.hub.models import bert

FIRST_LINES = {
    "transformers first": "import transformers; import dynorm.hub",
    "class first, and reloaded": (
        "from transformers import BertModel; import importlib, transformers, dynorm.hub; "
        "importlib.reload(dynorm.hub); "
        "importlib.reload(sys.modules['dynorm.hub.transformers'])"
    ),
    "dynorm first, and a first import that fails": (
        "import dynorm.hub; sys.modules['transformers.modeling_utils'] = None\n"
        "try: from transformers import PreTrainedModel\nexcept ImportError: pass\n"
        "del sys.modules['transformers.modeling_utils']; import transformers"
    ),
    "dynorm first, and reloaded": (
        "import importlib, dynorm.hub; importlib.reload(dynorm.hub); assert 'transformers' not in "
        "sys.modules; "
        "import transformers"
    ),
}
ORDERS = """
import json, os, sys, torch
for name, first_lines in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        exec(first_lines)
        model = transformers.AutoModel.from_pretrained(os.path.join(sys.argv[2], "m"))
        assert type(model.embeddings.LayerNorm).__name__ == "DyISRU"
        model.save_pretrained(os.path.join(sys.argv[2], name))
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":", flush=True)
    assert "transformers" not in sys.modules
"""


def test_from_pretrained_works_in_either_order(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    # One process that has imported torch alone, forked for each order.
    run = fresh(ORDERS, json.dumps(FIRST_LINES), tmp_path)
    assert run.stdout.splitlines() == [f"{order}:0" for order in FIRST_LINES], run.stderr
    for order in FIRST_LINES:
        assert "dynorm" in (tmp_path / order / "config.json").read_text()


def test_another_transformers_can_still_be_imported(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '4.0.0'")
    (tmp_path / "transformers" / "modeling_utils.py").write_text("class PreTrainedModel: pass")
    script = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
import dynorm.hub
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import transformers.modeling_utils
print(*[warning.message for warning in caught])
"""
    assert "dynorm is unknown to this transformers" in fresh(script, tmp_path).stdout


def test_without_transformers_its_directories_do_not_load(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    script = """
import sys
sys.modules["transformers"] = None
from dynorm.hub import load
try:
    load(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error)
"""
    assert "StorageError transformers 5 must be installed" in fresh(script, tmp_path / "m").stdout
