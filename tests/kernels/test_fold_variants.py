"""Every instruction-set variant of the host fold gives the same hash and stays inside its strip."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvcanary_plugin.kernels.build import SOURCE_DIR

# Every strip is a heap block of exactly its size, so that the sanitizer sees a read behind it.
PROGRAM = r"""
#include <cstdio>
#include <memory>
#include "fold.h"
using namespace kvcanary;

int main() {
  for (int64_t size = 1; size <= 300; ++size) {
    std::unique_ptr<uint8_t[]> blocks[3];
    Source sources[3];
    uint64_t state = static_cast<uint64_t>(size), sum = 0;
    for (int index = 0; index < 3; ++index) {
      blocks[index].reset(new uint8_t[static_cast<size_t>(size)]);
      for (int64_t byte = 0; byte < size; ++byte) {
        state = splitmix64(state + kGolden);
        blocks[index][byte] = static_cast<uint8_t>(state);
      }
      sources[index] = {reinterpret_cast<int64_t>(blocks[index].get()), size, 1, size, size};
      for (int64_t word = 0; word * 8 < size; ++word) {
        uint64_t value = 0;
        for (int64_t byte = word * 8; byte < size && byte < word * 8 + 8; ++byte) {
          value |= static_cast<uint64_t>(blocks[index][byte]) << (8 * (byte % 8));
        }
        sum += fold_word(value, source_key(index), word);
      }
    }
    const uint64_t expected = splitmix64(sum);
    if (fold_portable(sources, 3, 0) != expected || fold_slot(sources, 3, 0) != expected) {
      std::printf("differs at %d bytes\n", static_cast<int>(size));
      return 1;
    }
  }
  return 0;
}
"""


@pytest.mark.parametrize(
    "flags", [("-O3",), ("-O1", "-fsanitize=address,undefined")], ids=["optimised", "sanitised"]
)
def test_portable_and_chosen_fold_agree_at_every_size(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, program = tmp_path / "fold.cc", tmp_path / "fold"
    source.write_text(PROGRAM)
    subprocess.run(
        [compiler, "-std=c++17", *flags, f"-I{SOURCE_DIR}", str(source), "-o", str(program)],
        check=True,
    )
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
