"""A stand-in for the Hub: what is uploaded to `org/name` lies in a folder of that name."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError


class LocalHub:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.commits = root, []
        read = ModelCard.load

        def create_repo(api, repo_id, **kwargs):
            (root / repo_id).mkdir(parents=True, exist_ok=True)
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(api, repo_id, operations, **kwargs):
            for operation in operations:
                place = root / repo_id / operation.path_in_repo
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(operation.path_or_fileobj, place)
            self.commits.append((repo_id, sorted(operation.path_in_repo for operation in operations)))
            return SimpleNamespace(oid="0" * 40)

        def upload_folder(api, *, repo_id, folder_path, **kwargs):
            shutil.copytree(folder_path, root / repo_id, dirs_exist_ok=True)
            files = (path for path in Path(folder_path).rglob("*") if path.is_file())
            self.commits.append((repo_id, sorted(str(path.relative_to(folder_path)) for path in files)))
            return SimpleNamespace(oid="0" * 40)

        def load(repo_id, *args, **kwargs):
            if Path(repo_id).exists():
                return read(repo_id, *args, **kwargs)
            if (root / repo_id / "README.md").exists():
                return read(root / repo_id / "README.md")
            raise EntryNotFoundError(f"{repo_id} holds no card")

        for method in (create_repo, create_commit, upload_folder):
            monkeypatch.setattr(HfApi, method.__name__, method)
        monkeypatch.setattr(ModelCard, "load", load)
