"""The kernels of src/subquad/native/src, compiled where there is a C++ compiler; everything else is in pyproject.toml.

They are a plain C library that Python opens with ctypes, so neither torch's headers nor Python's are needed, and one
binary serves all versions of both. Without a compiler the installation continues, and subquad uses only torch.
"""

import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    def get_export_symbols(self, extension: Extension) -> list[str]:
        return []  # not a Python module: it has no initializer


# Clang for macOS rejects -static-libgcc, and its standard library is part of the system.
STATIC = ["-static-libstdc++", "-static-libgcc"] if sys.platform == "linux" else []
FOLDER = "src/subquad/native/src"
KERNELS = Extension(
    "subquad.native._kernels",
    sources=sorted(glob(f"{FOLDER}/*.cpp")),
    depends=sorted(glob(f"{FOLDER}/*.h")),
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-fno-math-errno",  # so that roots are vectors too
        "-pthread",
        "-fvisibility=hidden",
        "-Wno-psabi",
        "-Wno-ignored-attributes",
    ],
    extra_link_args=["-pthread", *STATIC],
    language="c++",
    optional=True,  # without a compiler: a warning, and no kernels
    py_limited_api=True,
)

setup(ext_modules=[KERNELS], cmdclass={"build_ext": BuildKernels}, options={"bdist_wheel": {"py_limited_api": "cp311"}})
