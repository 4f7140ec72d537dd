"""Give a new venv packages that this interpreter has already, as hard links: no download, no second copy on the disk.

usage: PYTHON scripts/link_packages.py VENV NAME…    (both of one Python version; a name that is not here is left out)

pip then takes them for installed, and replaces those whose version does not fit. Only what lies in site-packages is linked: scripts
name the interpreter that they were installed for.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def main() -> None:
    venv, *names = sys.argv[1:]
    target = Path(venv) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in names:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            if ".." not in file.parts and source.is_file():
                _link(source, target / file)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


if __name__ == "__main__":
    main()
