"""Refuse unsupported versions of packages, before LAVIS fails with them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

# Versions with which LAVIS 1.0.2 and this package run; `run_scripts/requirements/` has tested sets
# of them.
SUPPORTED = {
    "salesforce-lavis": "==1.0.2",
    "torch": ">=2.0",
    "transformers": ">=4.25,<6",
    "timm": ">=0.4.12",
    "omegaconf": ">=2.1,<3",
    "fairscale": ">=0.4.4",
}
# --no-deps, as LAVIS's metadata would replace other packages by versions of 2023.
INSTALL = (
    'run in a clone of lavis_mafa: pip install ".[lavis]" && '
    f'pip install --no-deps "salesforce-lavis{SUPPORTED["salesforce-lavis"]}"'
)


class UnsupportedVersionError(ImportError):
    """A package is missing, or has a version with which LAVIS or this package cannot run."""


def check_versions() -> None:
    """Check the packages that LAVIS and this package need.

    Raises:
        UnsupportedVersionError: naming the installed and the needed version, and the command to
            run.
    """
    for name, wanted in SUPPORTED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UnsupportedVersionError(
                f"this needs {name} ({wanted}), which is not installed; {INSTALL}"
            ) from None
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(wanted, prereleases=True).contains(found):
            options = "--no-deps " if name == "salesforce-lavis" else ""
            raise UnsupportedVersionError(
                f"lavis_mafa needs {name} {wanted}, but {found} is installed; "
                f'run: pip install {options}"{name}{wanted}"'
            )
