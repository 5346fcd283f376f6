#include "shared_memory.h"

#include <cerrno>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace ring_reduce {

namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

int create_shared_memory(std::size_t bytes) {
  const int fd = memfd_create("ring_reduce", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail(errno, "memfd_create for the ring's shared memory");
  int error = ftruncate(fd, static_cast<off_t>(bytes)) != 0 ? errno : 0;
  // Allocates every page now: a page that can't be had later would be a SIGBUS in the middle of a call.
  if (error == 0) error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error == 0 && fcntl(fd, F_ADD_SEALS, kSizeSeals) != 0) error = errno;
  if (error != 0) {
    ::close(fd);
    fail(error, "the ring needs " + std::to_string(bytes) +
                    " bytes of shared memory a rank and could not allocate them; free memory or use fewer lanes");
  }
  return fd;
}

SharedMapping::SharedMapping(int fd, std::size_t bytes) : bytes_(bytes) {
  struct stat status{};
  if (fstat(fd, &status) != 0) fail(errno, "fstat of a rank's shared memory");
  const int seals = fcntl(fd, F_GET_SEALS);
  if (static_cast<std::size_t>(status.st_size) < bytes || seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    throw std::invalid_argument("a rank's shared memory has " + std::to_string(status.st_size) + " bytes where " +
                                std::to_string(bytes) + " are needed, or its size is not sealed");
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (base == MAP_FAILED) {
    fail(errno, "mapping " + std::to_string(bytes) +
                    " bytes of a rank's shared memory failed; is there a limit on address space (ulimit -v)?");
  }
  base_ = static_cast<std::byte*>(base);
}

SharedMapping::SharedMapping(SharedMapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

SharedMapping::~SharedMapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

}  // namespace ring_reduce
