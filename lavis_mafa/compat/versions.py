"""Refuse versions of packages that cannot work, before LAVIS fails on them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

# What LAVIS 1.0.2 and this package run with; `run_scripts/requirements/` has tested sets of them.
SUPPORTED = {
    "salesforce-lavis": "==1.0.2",
    "torch": ">=2.0",
    "transformers": ">=4.25,<6",
    "timm": ">=0.4.12",
    "omegaconf": ">=2.1,<3",
    "fairscale": ">=0.4.4",
}
# LAVIS's own metadata would replace the others by versions of 2023.
INSTALL = (
    'run in a clone of lavis_mafa: pip install ".[lavis]" && '
    f'pip install --no-deps "salesforce-lavis{SUPPORTED["salesforce-lavis"]}"'
)


class UnsupportedVersionError(ImportError):
    """A package is missing, or has a version that LAVIS or this package cannot run with."""


def check_versions() -> None:
    """Check the packages that LAVIS and this package build on.

    Raises:
        UnsupportedVersionError: naming what is there, what is needed and the command that mends it.
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
