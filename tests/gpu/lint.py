"""What the compilers made of the ring's kernels here: no spills, and the lint of the machine code and of PTX."""

from __future__ import annotations

from findings import attempt


def main() -> None:
    import cuda_lint

    attempt("PTX of csrc/cuda_ring.cu", cuda_lint.check_this_tree)


if __name__ == "__main__":
    main()
