"""The compiled kernels. Everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"fairveil.{name}",
            [f"src/fairveil/{name}.c"],
            depends=["src/fairveil/_convolution.h"],
            # Vectors of roots and of rounding need no error flags. Nothing here changes a result.
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
            optional=True,  # without a compiler the pure form is used
        )
        for name in ("_noise", "_convolution")
    ]
)
