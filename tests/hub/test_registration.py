"""``import dynorm`` before or after transformers, without it, or with another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynorm.hub import save
from tests.ecosystem.models import bert
from tests.fresh import run

START = """
import os, sys, warnings
from pathlib import Path
warnings.simplefilter("error")
assert not {"dynorm", "transformers"} & sys.modules.keys()
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
assert "dynorm" in Path("class first/config.json").read_text()
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
assert "dynorm" in Path("again/config.json").read_text()
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
    assert "install dynorm and import it before you load this model" in str(error)
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
    """A folder with a saved model, a program that loads it, and another transformers."""
    folder = tmp_path_factory.mktemp("registration")
    save(bert(), folder / "m")
    (folder / "program.py").write_text(PROGRAM)
    package = folder / "another" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '4.0.0'")
    (package / "modeling_utils.py").write_text("class PreTrainedModel: pass")
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_program_loads_the_layers_or_says_why_not(folder: Path, name: str) -> None:
    script, end = SCRIPTS[name]
    assert end in run(START + script, imported="libraries", folder=folder)
