"""Check the built distributions: python release/check_dist.py dist

- There is one wheel and one sdist of the version in pyproject.toml.
- Both contain every file of the package. The wheel contains nothing else; the sdist also contains files outside
  `src/hansa`.
- Neither contains a key or a database.
- The wheel installs into an empty folder, and the package and its `hansa --version` work from there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = (".key", ".pem", ".token", ".db", ".pyc")  # endings of what must never be in a release


def package() -> set[str]:
    """Return the package's files in the repository."""
    files = subprocess.run(
        ["git", "ls-files", "src/hansa"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return {name.removeprefix("src/") for name in files.split()}


def check(dist: Path) -> list[str]:
    """Return the problems found."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if [p.name for p in wheels] != [f"hansa-{version}-py3-none-any.whl"]:
        return [f"expected one wheel of version {version}, found {[p.name for p in wheels]}"]
    if [p.name for p in sdists] != [f"hansa-{version}.tar.gz"]:
        return [f"expected one sdist of version {version}, found {[p.name for p in sdists]}"]
    wrong, wanted = [], package()
    with zipfile.ZipFile(wheels[0]) as archive:
        if (bad := archive.testzip()) is not None:
            wrong.append(f"the wheel is damaged at {bad}")
        names = {name for name in archive.namelist() if not name.startswith(f"hansa-{version}.dist-info/")}
        if not any(name.endswith("LICENSE") for name in archive.namelist()):
            wrong.append("the wheel has no LICENSE")
    with tarfile.open(sdists[0]) as tar:
        packed = {member.name.partition("/")[2] for member in tar.getmembers() if not member.isdir()}
    sources = {name.removeprefix("src/") for name in packed if name.startswith("src/hansa/")}
    for what, difference in (
        ("the wheel lacks", wanted - names), ("the wheel has beside the package", names - wanted),
        ("the sdist lacks", wanted - sources), ("the sdist has beside the package", sources - wanted),
        ("a release must not have", {name for name in names | packed if name.endswith(PRIVATE)}),
    ):  # fmt: skip
        wrong += [f"{what} {name}" for name in sorted(difference)]
    return wrong or installed(wheels[0], version)


def installed(wheel: Path, version: str) -> list[str]:
    """Return the problems of the installed wheel, with the requirements of this environment."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "install", "--no-deps",
                        "--target", folder, str(wheel)], check=True)  # fmt: skip
        ask = f"import sys; sys.path.insert(0, {folder!r}); import hansa; print(hansa.__version__, hansa.__file__)"
        done = subprocess.run([sys.executable, "-c", ask], cwd=folder, capture_output=True, text=True, check=False)
        if done.stdout.split() != [version, str(Path(folder) / "hansa" / "__init__.py")]:
            return [f"the installed wheel does not import: {done.stdout} {done.stderr[-500:]}"]
        done = subprocess.run([Path(folder) / "bin" / "hansa", "--version"], cwd=folder, capture_output=True, text=True,
                              check=False, env={**os.environ, "PYTHONPATH": folder})  # fmt: skip
        if done.stdout != f"hansa {version}\n":
            return [f"the installed `hansa --version` does not work: {done.stdout} {done.stderr[-500:]}"]
    return []


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    print("\n".join(found) or "wheel and sdist contain the package and nothing else")
    sys.exit(bool(found))
