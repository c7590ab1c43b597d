"""The folder of publications: what is in it is complete, and a name is never used again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from streamlearn.backbone.lora import LoraMatrices, PlainLora
from streamlearn.errors import PublicationError
from streamlearn.export.formats import BaseModel
from streamlearn.publish.folder import PublicationFiles, check_folder
from streamlearn.publish.publication import Version
from streamlearn.snapshot.files import Files

BASE = BaseModel("base", None)
RUN = "5d3c1f" + "0" * 26
LORA = PlainLora({"model.layers.0.mlp.up_proj": LoraMatrices(torch.randn(4, 8), torch.randn(6, 4))}, 4, 8.0)


def version(name: str, regime: int = 1, **fields: Any) -> Version:
    values = {"run": "r", "step": 1, "weights_sha256": "0", "holdout": ("a",), "loss": 1.0, "backbone_loss": 2.0}
    return Version(name=name, regime=regime, **{**values, **fields})


def assert_shared(folder: Path, umask: int) -> None:
    """Every file and folder has the mode that the umask allows."""
    paths = [*folder.rglob("*")]
    modes = {path: path.stat().st_mode & 0o777 for path in paths}
    assert modes == {path: (0o777 if path.is_dir() else 0o666) & ~umask for path in paths}


def test_a_version_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Weights bit for bit, rank, alpha, and what it was tested on."""
    folder = PublicationFiles(tmp_path, BASE)
    written = version("s-regime-1@5-5d3c1f", holdout=("a", "b"))
    folder.write_version(written, LORA, "a card")
    assert folder.versions() == [written]
    read = folder.lora("s-regime-1@5-5d3c1f")
    assert (read.rank, read.alpha) == (LORA.rank, LORA.alpha)
    for name, matrices in LORA.layers.items():
        assert torch.equal(read.layers[name].A_ND, matrices.A_ND)
        assert torch.equal(read.layers[name].B_ON, matrices.B_ON)


def test_a_name_is_never_used_again(tmp_path: Path) -> None:
    """A server that cached the weights of a name would serve them for other ones."""
    folder = PublicationFiles(tmp_path, BASE)
    assert folder.unused_name("s-regime-1", 5, RUN) == "s-regime-1@5-5d3c1f"
    folder.write_version(version("s-regime-1@5-5d3c1f"), LORA, "")
    folder.prune([], [])
    assert folder.versions() == []
    again = PublicationFiles(tmp_path, BASE)
    assert again.unused_name("s-regime-1", 5, RUN) == "s-regime-1@5-5d3c1fr2"
    assert again.unused_name("s-regime-1", 6, RUN) == "s-regime-1@6-5d3c1f"


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """A version without its last rename never appears; its name is used up all the same."""

    class Killed(Files):
        def rename(self, old: Path, new: Path) -> None:
            raise KeyboardInterrupt

    folder = PublicationFiles(tmp_path, BASE, Killed())
    with pytest.raises(KeyboardInterrupt):
        folder.write_version(version("s-regime-1@5-5d3c1f"), LORA, "")
    assert folder.versions() == []
    after = PublicationFiles(tmp_path, BASE)
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == []
    assert after.unused_name("s-regime-1", 5, RUN) == "s-regime-1@5-5d3c1fr2"


def test_what_follows_a_cut_off_line_is_not_lost_with_it(tmp_path: Path) -> None:
    """The next version's name is used as well, also when its folder is gone."""
    history = tmp_path / "history.jsonl"
    PublicationFiles(tmp_path, BASE).write_version(version("s-regime-1@5-5d3c1f"), LORA, "")
    complete = history.read_bytes()
    history.write_bytes(complete + complete[:40])
    folder = PublicationFiles(tmp_path, BASE)
    folder.write_version(version("s-regime-1@6-5d3c1f"), LORA, "")
    folder.write_version(version("s-regime-1@7-5d3c1f"), LORA, "")
    folder.prune([], [])
    assert history.read_bytes().startswith(complete + complete[:40] + b"\n")
    again = PublicationFiles(tmp_path, BASE)
    assert [again.unused_name("s-regime-1", step, RUN) for step in (5, 6, 7)] == [
        "s-regime-1@5-5d3c1fr2",
        "s-regime-1@6-5d3c1fr2",
        "s-regime-1@7-5d3c1fr2",
    ]


def test_the_name_of_a_folder_is_used_whatever_the_history_says(tmp_path: Path) -> None:
    """A history that was lost does not make it a name for other weights; such a version counts as the oldest."""
    folder = PublicationFiles(tmp_path, BASE)
    folder.write_version(version("s-regime-1@5-5d3c1f"), LORA, "")
    (tmp_path / "history.jsonl").unlink()
    again = PublicationFiles(tmp_path, BASE)
    assert again.unused_name("s-regime-1", 5, RUN) == "s-regime-1@5-5d3c1fr2"
    again.write_version(version("s-regime-1@4-5d3c1f"), LORA, "")
    assert [known.name for known in again.versions()] == ["s-regime-1@5-5d3c1f", "s-regime-1@4-5d3c1f"]


def test_the_newest_versions_of_each_regime_of_this_run_are_kept(tmp_path: Path) -> None:
    """Those of another run are not counted."""
    folder = PublicationFiles(tmp_path, BASE)
    for name, regime, run in (("a@1", 1, "r"), ("a@2", 1, "r"), ("a@3", 1, "r"), ("b@1", 2, "r"), ("c@1", 1, "other")):
        folder.write_version(version(name, regime, run=run), LORA, "")
    assert sorted(folder.newest_names(2, run="r")) == ["a@2", "a@3", "b@1"]


def test_a_routing_state_of_a_step_that_comes_again_gets_another_name(tmp_path: Path) -> None:
    """Gateways may still be reading the first; what is not kept is removed."""
    folder = PublicationFiles(tmp_path, BASE)
    written = [folder.write_routing(step, {"a": np.arange(step)}) for step in (1, 2, 3, 3)]
    assert [path.removeprefix("routing/").removesuffix(".safetensors") for path in written] == ["1", "2", "3", "3r2"]
    folder.prune([], written[-2:])
    assert sorted(path.name for path in (tmp_path / "routing").iterdir()) == ["3.safetensors", "3r2.safetensors"]
    assert load_file(tmp_path / written[-1])["a"].tolist() == [0, 1, 2]


def test_a_tokenizer_is_named_by_its_content(tmp_path: Path) -> None:
    """The same one is not written twice; another one does not replace it under a reader."""
    folder = PublicationFiles(tmp_path, BASE)

    def save(text: str) -> str:
        return folder.write_tokenizer(lambda target: (target / "tokenizer.json").write_text(text))

    first, second = save("one"), save("two")
    assert first != second
    assert save("one") == first
    assert (tmp_path / first / "tokenizer.json").read_text() == "one"


def test_a_full_disk_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    """The caller tries again later."""

    class Full(Files):
        def sync(self, path: Path) -> None:
            raise OSError(28, "No space left on device", str(path))

    with pytest.raises(PublicationError, match="No space left on device"):
        PublicationFiles(tmp_path, BASE, Full()).write_version(version("s-regime-1@5-5d3c1f"), LORA, "")


def test_a_damaged_version_is_an_error(tmp_path: Path) -> None:
    """Nothing is compared with weights that cannot be read."""
    folder = PublicationFiles(tmp_path, BASE)
    folder.write_version(version("s-regime-1@5-5d3c1f"), LORA, "")
    (folder.path("s-regime-1@5-5d3c1f") / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(PublicationError, match="expected a LoRA"):
        folder.lora("s-regime-1@5-5d3c1f")
    (folder.path("s-regime-1@5-5d3c1f") / "version.json").write_text("{")
    with pytest.raises(PublicationError, match=r"version\.json"):
        folder.versions()


def test_a_folder_is_checked_without_being_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not exist yet, and one that was published to; what may not be written is named."""
    folder = tmp_path / "new" / "published"
    check_folder(folder)
    assert list(tmp_path.iterdir()) == []
    PublicationFiles(folder, BASE).write_version(version("s-regime-1@5-5d3c1f"), LORA, "")
    check_folder(folder)
    for refused in (folder, folder / "adapters", folder / "routing", folder / "history.jsonl"):
        with monkeypatch.context() as patched:
            patched.setattr("os.access", lambda path, _, refused=refused: path != refused)  # root may write everywhere
            with pytest.raises(
                PublicationError, match=rf"^{refused}: must be writable, .*permissions of publish\.folder$"
            ):
                check_folder(folder)
    (tmp_path / "file").touch()
    with pytest.raises(PublicationError, match=rf"^{tmp_path / 'file'}: must be writable, .*Not a directory"):
        check_folder(tmp_path / "file" / "published")
