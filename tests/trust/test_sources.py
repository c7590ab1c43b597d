"""No source loads code from data or starts a shell, and the search for such code works."""

from pathlib import Path

import pytest
import yaml

from streamlearn.settings import file as settings_file

from .rules import ROOT, SOURCES, faults

ACCEPTED = {
    "streamlearn/settings/file.py": ["yaml.load"],  # with its own subclass of SafeLoader: see below
}
"""Exceptions per file, each with its reason."""

BAD = {
    "import pickle": "pickle",
    "import pickle as harmless": "pickle",
    "from pickle import loads": "pickle.loads",
    "def f():\n    import cloudpickle": "cloudpickle",
    "from joblib.numpy_pickle import load": "joblib.numpy_pickle.load",
    "import dill, json": "dill",
    "import shelve": "shelve",
    "import marshal": "marshal",
    "import cPickle": "cPickle",
    "from importlib import import_module\nimport_module('pickle')": "pickle",
    "__import__('marshal').loads(b'')": "marshal",
    "eval('1')": "eval",
    "exec(code, {})": "exec",
    "compile('1', 'f', 'eval')": "compile",
    "run = eval": "eval",
    "import builtins\nbuiltins.exec('1')": "exec",
    "import builtins\ngetattr(builtins, 'eval')('1')": "eval",
    "import torch\ntorch.load('f')": "torch.load",
    "import torch\ntorch.load('f', weights_only=True)": "torch.load",
    "import torch as t\nread = t.load": "torch.load",
    "from torch import load as read\nread('f')": "torch.load",
    "import torch\ngetattr(torch, 'load')('f')": "torch.load",
    "import numpy as np\nnp.load('f')": "numpy.load without allow_pickle",
    "import numpy as np\nnp.load('f', allow_pickle=True)": "allow_pickle is not False",
    "import numpy as np\nnp.load('f', allow_pickle=flag)": "allow_pickle is not False",
    "import numpy as np\nread = np.load": "numpy.load",
    "from numpy import load\nload('f')": "numpy.load without allow_pickle",
    "import yaml\nyaml.load(text, Loader=yaml.Loader)": "yaml.load",
    "import yaml\nyaml.unsafe_load(text)": "yaml.unsafe_load",
    "from yaml import full_load": "yaml.full_load",
    "import subprocess\nsubprocess.run('ls', shell=True)": "shell is not False",
    "import subprocess\nsubprocess.Popen('ls', shell=flag)": "shell is not False",
    "run(**{'shell': True})": "shell is not False",
    "import subprocess\nsubprocess.getoutput('ls')": "subprocess.getoutput",
    "import os\nos.system('ls')": "os.system",
    "from os import system as harmless": "os.system",
    "Auto.from_pretrained('m', trust_remote_code=True)": "trust_remote_code is not False",
    "Auto.from_pretrained('m', trust_remote_code=settings.trust)": "trust_remote_code is not False",
    "options = {'trust_remote_code': 1}": "trust_remote_code is not False",
}
GOOD = (
    "assert 1",
    "model.eval()",
    "import re\nre.compile('a')",
    "import json\njson.load(file)",
    "import numpy as np\nnp.load('f', allow_pickle=False)",
    "import yaml\nyaml.safe_load(text)",
    "import subprocess\nsubprocess.run(['ls'], shell=False)",
    "Auto.from_pretrained('m', trust_remote_code=False)",
    "from .pickle import jar",
    "self.compile(1); exec_s = 2",
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_loads_no_code_from_data_and_starts_no_shell(path: Path) -> None:
    """Neither directly nor under an alias."""
    found = [fault.partition(": ")[2] for fault in faults(path.read_text(encoding="utf-8"))]
    assert found == ACCEPTED.get(str(path.relative_to(ROOT)), [])


def test_the_accepted_exceptions_are_safe() -> None:
    """The loader of configuration files creates plain values and nothing else."""
    assert issubclass(settings_file._StrictLoader, yaml.SafeLoader)
    with pytest.raises(yaml.constructor.ConstructorError):
        yaml.load("!!python/object/apply:os.getpid []", Loader=settings_file._StrictLoader)  # noqa: S506


@pytest.mark.parametrize(("source", "fault"), BAD.items())
def test_the_search_finds_what_it_should(source: str, fault: str) -> None:
    assert fault in [found.partition(": ")[2] for found in faults(source)]


@pytest.mark.parametrize("source", GOOD)
def test_the_search_accepts_harmless_code(source: str) -> None:
    assert faults(source) == []


def test_both_packages_are_searched() -> None:
    """With an empty list of sources every test would pass."""
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == {"streamlearn", "connectors"}
    assert len(SOURCES) > 100
