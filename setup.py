"""Packaging: the top-level folders of this repository, installed as ``leangrpo.<folder>``.

There is no folder ``leangrpo/``: it is a namespace (PEP 420) made of the mapped folders. Names as
generic as ``kernels`` and ``tools`` must not enter site-packages: a Hugging Face library is called
``kernels`` too.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

FOLDERS = ("configs", "engine", "kernels", "planners", "tools")
DATA = ["*.yaml", "*.json", "*.safetensors", "*.txt", "*.md", "py.typed"]

CORE = [
    "torch>=2.11",
    "deepspeed>=0.18",
    "diffusers>=0.36",
    "transformers>=4.57.1",
    "peft>=0.18",
    "bitsandbytes>=0.48",
    "psutil>=6.0",
    "nvidia-ml-py>=12.560",
    "safetensors>=0.6.1",
    "pydantic>=2.11",
    "PyYAML>=6.0",
    "numpy>=2.1",
    "pillow>=11.0",
    "matplotlib>=3.9",
    "tensorboard>=2.18",
    "tqdm>=4.66",
]
TEST = ["pytest>=8.3", "pytest-timeout>=2.3.1"]
LINT = ["ruff>=0.9", "mypy>=1.15", "types-psutil", "types-PyYAML", "types-tqdm"]
EXTRAS = {
    "test": TEST,
    "dev": [*TEST, *LINT, "build>=1.2", "mlxtend>=0.23"],
    "cuda": ["triton>=3.4"],
    "rewards": ["open_clip_torch>=2.30"],
    "wandb": ["wandb>=0.19"],
}


def packages_in(folder: str) -> list[str]:
    """The folder and all below it; one left out works with -e and is missing in a wheel."""
    nested = find_namespace_packages(folder, exclude=["__pycache__", "*.__pycache__"])
    return [f"leangrpo.{folder}", *(f"leangrpo.{folder}.{name}" for name in nested)]


setup(
    name="leangrpo",
    version="0.1.0",
    description="Diffusion reinforcement learning without the second forward pass",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={f"leangrpo.{folder}": folder for folder in FOLDERS},
    packages=[package for folder in FOLDERS for package in packages_in(folder)],
    package_data={"": DATA},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["leangrpo = leangrpo.tools.cli:main"]},
    zip_safe=False,
)
