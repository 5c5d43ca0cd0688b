"""``import dynorm`` before or after transformers, without it, or with another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynorm.hub import save
from tests.hub.models import bert

# A process that has imported most of the modules that transformers imports, forked for each script.
PARENT = """
import json, os, sys, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import huggingface_hub, scipy.optimize, torch._dynamo, torch.distributed.fsdp, torchao
sys.path.insert(0, os.getcwd())
for name, script in json.load(sys.stdin).items():
    assert not {"dynorm", "transformers"} & sys.modules.keys()
    child = os.fork()
    if not child:
        output = os.open(f"{name}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        exec(script)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
PROGRAM = """
import transformers

def load(**options):
    model = transformers.AutoModel.from_pretrained("m", **options)
    print(type(model.embeddings.LayerNorm).__name__)
    return model

if __name__ == "__main__":
    load().save_pretrained("again")
"""
# The scripts, and the end of what each prints.
SCRIPTS = {
    "a class of transformers first, and a reload": (
        """
import importlib
from transformers import BertModel
import program, dynorm.hub
importlib.reload(dynorm.hub)
importlib.reload(sys.modules["dynorm.hub.transformers"])
program.load().save_pretrained("class first")
""",
        "DyISRU",
    ),
    "dynorm first, a reload, an import that fails, and a program that is run by its name": (
        """
import importlib, runpy, dynorm.hub
importlib.reload(dynorm.hub)
assert "transformers" not in sys.modules
sys.modules["transformers.modeling_utils"] = None
try:
    from transformers import PreTrainedModel
except ImportError:
    del sys.modules["transformers.modeling_utils"]
runpy.run_module("program", run_name="__main__", alter_sys=True)
""",
        "DyISRU",
    ),
    "a config before any model": (
        """
import dynorm
from transformers import AutoConfig, AutoModel
from transformers.quantizers.auto import AutoQuantizationConfig
assert "transformers.modeling_utils" not in sys.modules
config = AutoConfig.from_pretrained("m")
method = AutoQuantizationConfig.from_dict(config.quantization_config)
# transformers says that the config has one already, which it takes.
warnings.simplefilter("ignore")
model = AutoModel.from_pretrained("m", quantization_config=method)
print(type(model.embeddings.LayerNorm).__name__)
""",
        "DyISRU",
    ),
    "without dynorm, and then with the code of the folder": (
        """
import program
try:
    program.load()
except ValueError as error:
    assert "import dynorm before you load this model" in str(error)
    program.load(trust_remote_code=True)
""",
        "DyISRU",
    ),
    "another transformers": (
        """
sys.path.insert(0, os.path.abspath("another"))
import dynorm.hub
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import transformers.modeling_utils
print(*[warning.message for warning in caught])
""",
        "dynorm is unknown to this transformers",
    ),
    "without transformers": (
        """
sys.modules["transformers"] = None
from dynorm.hub import load
try:
    load("m")
except OSError as error:
    print(type(error).__name__, error)
""",
        "StorageError transformers 5 must be installed",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved model, and the output of each script in a file."""
    folder = tmp_path_factory.mktemp("registration")
    save(bert(), folder / "m")
    (folder / "program.py").write_text(PROGRAM)
    package = folder / "another" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '4.0.0'")
    (package / "modeling_utils.py").write_text("class PreTrainedModel: pass")
    subprocess.run(
        [sys.executable, "-W", "error", "-c", PARENT],
        input=json.dumps({name: script for name, (script, _) in SCRIPTS.items()}),
        cwd=folder,
        text=True,
        check=True,
    )
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_program_loads_the_layers_or_says_why_not(folder: Path, name: str) -> None:
    assert SCRIPTS[name][1] in (folder / f"{name}.txt").read_text()


def test_each_order_of_imports_writes_the_layers_too(folder: Path) -> None:
    for again in ("class first", "again"):
        assert "dynorm" in (folder / again / "config.json").read_text()
