"""The compiled kernel. Everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "fairveil._noise",
            ["src/fairveil/_noise.c"],
            # Vectors of roots and of rounding need no error flags. Nothing here changes a result.
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
            optional=True,  # without a compiler the pure form is used
        )
    ]
)
