"""Builds ring_reduce._core, the C++ core, and on request ring_reduce._cuda; the rest is in pyproject.toml.

RING_REDUCE_CUDA        1: build _cuda, or fail; 0: don't; unset: try where there are nvcc and a GPU
RING_REDUCE_CUDA_ARCH   "native", the default: this machine's GPU, or PTX alone where there is none, which any GPU
                        compiles when it loads it; "all", which takes minutes; or a list such as "80,90"
NVCC                    the compiler; default: nvcc on PATH, or of CUDA_HOME or /usr/local/cuda
RING_REDUCE_BUILD_JOBS  compilers at the same time
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent

# Bits are part of the contract: no fused multiply-add and no fast-math on any machine. No -march either: the core
# holds its passes in several vector widths and chooses at run time, so one wheel serves every processor.
COMPILE_FLAGS = [
    "-O3",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-Wall",
    "-Wextra",
    "-Werror=switch",
    "-pthread",
]
NVCC_FLAGS = ["-std=c++20", "-O3", "--fmad=false", "-Werror", "all-warnings", "-cudart", "static"]
# Where a function holds PTX alone, its parameters are unused on the host.
HOST_FLAGS = [
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
]
NVCC_FLAGS += ["-Xcompiler", ",".join([*HOST_FLAGS, "-Werror=switch"])]

# Those of them that nvcc knows: sm_100 and sm_120 came with CUDA 12.8.
ARCHITECTURES = ["80", "86", "89", "90", "100", "120"]
OLDEST = ARCHITECTURES[0]


# Of the CPU core, what the GPU ring needs on the host too.
CUDA_SHARES = ("call.cpp", "process.cpp", "shared_memory.cpp")


def is_cuda(source: Path) -> bool:
    return source.name == "bind_cuda.cpp" or source.name.startswith("cuda_")


def core_extension() -> Pybind11Extension:
    """Every source of csrc/ but those for CUDA, rebuilt when any header changes."""
    csrc = ROOT / "csrc"
    sources = [path for path in csrc.glob("*.cpp") if not is_cuda(path)]
    headers = [path for path in csrc.glob("*.h") if not is_cuda(path)]
    return Pybind11Extension(
        "ring_reduce._core",
        sources=sorted(str(path.relative_to(ROOT)) for path in sources),
        depends=sorted(str(path.relative_to(ROOT)) for path in headers),
        cxx_std=20,
        extra_compile_args=COMPILE_FLAGS,  # Pybind11Extension adds -fvisibility=hidden and -g0
        extra_link_args=["-pthread"],
    )


def cuda_extension(nvcc: Path, *, optional: bool = False) -> Pybind11Extension:
    """The GPU ring; its kernels, *.cu, are compiled by ``BuildExtensions``. An ``optional`` one may fail to compile."""
    csrc = ROOT / "csrc"
    sources = [path for path in csrc.glob("*.cpp") if is_cuda(path) or path.name in CUDA_SHARES]
    return Pybind11Extension(
        "ring_reduce._cuda",
        sources=sorted(str(path.relative_to(ROOT)) for path in sources),
        depends=sorted(str(path.relative_to(ROOT)) for path in [*csrc.glob("*.h"), *csrc.glob("*.cu")]),
        cxx_std=20,
        extra_compile_args=COMPILE_FLAGS,
        include_dirs=[str(path) for path in include_directories(nvcc)],
        # The runtime is linked in, so that the module loads, and says what is missing, on machines without CUDA.
        libraries=["cudart_static", "dl", "rt", "pthread"],
        library_dirs=[str(path) for path in library_directories(nvcc)],
        optional=optional,
    )


def find_nvcc() -> Path | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [
        os.environ.get("NVCC"),
        shutil.which("nvcc"),
        *(f"{home}/bin/nvcc" for home in homes if home),
    ]
    return next((Path(path) for path in candidates if path and Path(path).is_file()), None)


def dry_run(nvcc: Path) -> str:
    """What nvcc would do: where it looks for headers and libraries itself. It may be a script that starts another."""
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def include_directories(nvcc: Path) -> list[Path]:
    (includes, *_) = re.findall(r"(?<!_)INCLUDES=(.*)", dry_run(nvcc)) or [""]
    found = [Path(path) for path in re.findall(r'"?-(?:I|isystem)\s*"?([^"\s]+)"?', includes)]
    return [*found, nvcc.resolve().parent.parent / "include"]


def library_directories(nvcc: Path) -> list[Path]:
    """Where libcudart_static.a is."""
    (libraries, *_) = re.findall(r"LIBRARIES=(.*)", dry_run(nvcc)) or [""]
    found = [Path(path) for path in re.findall(r'"?-L\s*"?([^"\s]+)"?', libraries)]
    return [*found, nvcc.resolve().parent.parent / "lib64"]


def gpu_is_visible() -> bool:
    """Asked of the device files, since it may be a container that was given no GPU; /dev/dxg is WSL's."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def nvcc_says(nvcc: Path, *arguments: str) -> str:
    return subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=True).stdout


def architecture_flags(nvcc: Path) -> list[str]:
    """Machine code for the architectures asked for, and PTX of the newest for GPUs to come."""
    asked = os.environ.get("RING_REDUCE_CUDA_ARCH") or "native"
    if asked == "native":
        ptx_alone = f"-gencode=arch=compute_{OLDEST},code=compute_{OLDEST}"
        return ["-arch=native"] if gpu_is_visible() else [ptx_alone]
    known = re.findall(r"compute_(\d+)", nvcc_says(nvcc, "--list-gpu-arch"))
    wanted = (
        ARCHITECTURES if asked == "all" else [word.strip().removeprefix("sm_") for word in asked.split(",")]
    )
    if asked == "all":
        wanted = [number for number in wanted if number in known]
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in wanted]
    return [*flags, f"-gencode=arch=compute_{wanted[-1]},code=compute_{wanted[-1]}"]


class BuildExtensions(build_ext):
    """Compiles csrc/*.cu with nvcc, several at a time, and links the objects into ring_reduce._cuda."""

    def build_extension(self, ext: Any) -> None:
        if ext.name == "ring_reduce._cuda":
            ext.extra_objects = self.compile_cuda()
        super().build_extension(ext)

    def compile_cuda(self) -> list[str]:
        nvcc = find_nvcc()
        assert nvcc is not None
        flags = [*NVCC_FLAGS, *architecture_flags(nvcc), "--threads", str(jobs())]
        temporary = Path(self.build_temp) / "cuda"
        temporary.mkdir(parents=True, exist_ok=True)
        running = []
        for source in sorted((ROOT / "csrc").glob("*.cu")):
            output = temporary / f"{source.stem}.o"
            command = [str(nvcc), *flags, "-c", str(source), "-o", str(output)]
            print(" ".join(command), flush=True)
            running.append((subprocess.Popen(command), output))
        failed = [output.stem for process, output in running if process.wait() != 0]
        if failed:
            raise CompileError(f"nvcc could not compile {', '.join(failed)}")
        return [str(output) for _, output in running]


def jobs() -> int:
    return int(os.environ.get("RING_REDUCE_BUILD_JOBS", 0)) or os.cpu_count() or 1


def why_no_cuda_extension(wanted: str, *, has_nvcc: bool, has_gpu: bool) -> str | None:
    """Why _cuda is left out, None if it is built. ``wanted`` is RING_REDUCE_CUDA; ``SystemExit`` if it can't be had."""
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"RING_REDUCE_CUDA={wanted}: leave it unset, or use 0 or 1")
    if wanted == "1" and not has_nvcc:
        raise SystemExit("RING_REDUCE_CUDA=1, and there is no nvcc; put it on PATH, or name it in NVCC")
    if wanted == "1":
        return None
    if wanted == "0":
        return "RING_REDUCE_CUDA=0"
    if not has_nvcc:
        return "there is no nvcc"
    return None if has_gpu else "no GPU is visible; RING_REDUCE_CUDA=1 builds it all the same"


def extensions() -> list[Pybind11Extension]:
    wanted = os.environ.get("RING_REDUCE_CUDA", "")
    nvcc = find_nvcc()
    reason = why_no_cuda_extension(wanted, has_nvcc=nvcc is not None, has_gpu=gpu_is_visible())
    if nvcc is None or reason is not None:
        print(f"ring_reduce is built without CUDA: {reason}")
        return [core_extension()]
    return [core_extension(), cuda_extension(nvcc, optional=wanted != "1")]


if __name__ == "__main__":  # as it is for pip too; the tests read the functions
    ParallelCompile("RING_REDUCE_BUILD_JOBS").install()
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtensions})
