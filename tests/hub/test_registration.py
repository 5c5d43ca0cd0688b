"""``import dynorm`` before or after transformers, without it, or with another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
# These parts of torch take half of the time to import transformers.
import json, os, sys, torch._dynamo, torch.distributed.tensor
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
    # One process that has imported only torch, forked for each order.
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


PROGRAM = """
import sys

import transformers

def load(folder, **options):
    model = transformers.AutoModel.from_pretrained(folder, **options)
    print(type(model.embeddings.LayerNorm).__name__, flush=True)

def main():
    load(sys.argv[1])

if __name__ == "__main__":
    main()
"""


WAYS = """
# These parts of torch take half of the time to import transformers.
import os, runpy, sys, torch._dynamo, torch.distributed.tensor
for number, lines in enumerate(sys.argv[2:]):
    print(number, end=":", flush=True)
    child = os.fork()
    if not child:
        exec(lines)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(flush=True)
    assert "transformers" not in sys.modules
"""


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the folder is on its path."""
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_programs_that_build_the_model_themselves(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    (tmp_path / "program.py").write_text(PROGRAM)
    model = str(tmp_path / "m")
    # Without dynorm; with it as a module, by its name; with it by its function; by trusted code.
    ways = (
        "runpy.run_module('program', run_name='__main__', alter_sys=True)",
        "import dynorm; runpy.run_module('program', run_name='__main__', alter_sys=True)",
        "import dynorm; from program import main; main()",
        "from program import load; load(sys.argv[1], trust_remote_code=True)",
    )
    run = ran(tmp_path, "-c", WAYS, model, *ways)
    assert "import dynorm before you load this model" in run.stderr
    assert run.stdout.splitlines() == ["0:", "1:DyISRU", "2:DyISRU", "3:DyISRU"]


def test_a_quantization_config_may_be_read_before_any_model_is_imported(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    script = """
import sys, warnings, dynorm
# transformers says that the config has one already, which it takes.
warnings.simplefilter("ignore")
from transformers import AutoConfig, AutoModel
from transformers.quantizers.auto import AutoQuantizationConfig
assert "transformers.modeling_utils" not in sys.modules
config = AutoConfig.from_pretrained(sys.argv[1])
method = AutoQuantizationConfig.from_dict(config.quantization_config)
model = AutoModel.from_pretrained(sys.argv[1], quantization_config=method)
print(type(model.embeddings.LayerNorm).__name__)
"""
    run = fresh(script, tmp_path / "m", check=False)
    assert run.stdout.split() == ["DyISRU"], run.stderr
