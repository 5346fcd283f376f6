// Streams and events of the fake CUDA runtime.
#include "fake_cuda.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace fake_cuda {

namespace {

using Works = std::deque<std::function<void()>>;

// What was captured, by the number of the capture in this job, in an order in which it may run.
Works& graph_of(unsigned long long capture) {
  static auto* all = new std::map<std::pair<std::string, unsigned long long>, Works>;
  return (*all)[{environment("FAKE_CUDA_DIR"), capture}];
}

// First in, first out. Its thread is never joined: like a GPU's queue it may outlive what the test holds of it.
class Stream {
 public:
  Stream() {
    std::thread([this] { run(); }).detach();
  }

  void add(std::function<void()> work) {
    const std::scoped_lock lock(mutex_);
    (capture != 0 ? graph_of(capture) : queue_).push_back(std::move(work));
    changed_.notify_all();
  }

  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }

  unsigned long long capture = 0;

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      work();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Works queue_;
  bool busy_ = false;
};

// Outlives its handle: a stream may still hold it.
class Event {
 public:
  void record(Stream& stream, const std::shared_ptr<Event>& self) {
    const std::scoped_lock lock(mutex_);
    capture_ = stream.capture;
    stream.add([self, number = ++recorded_] { self->reach(number); });
  }

  cudaError_t wait_on(Stream& stream, const std::shared_ptr<Event>& self) {
    const std::scoped_lock lock(mutex_);
    if (recorded_ != 0 && capture_ != stream.capture) return cudaErrorStreamCaptureIsolation;
    stream.add([self, number = recorded_] { self->until(number); });
    return cudaSuccess;
  }

 private:
  void reach(unsigned long long number) {
    const std::scoped_lock lock(mutex_);
    reached_ = std::max(reached_, number);  // a replay reaches the same again
    changed_.notify_all();
  }

  void until(unsigned long long number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= number; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned long long capture_ = 0;  // that it was last recorded in
  unsigned long long recorded_ = 0;
  unsigned long long reached_ = 0;
};

std::mutex all_mutex;

std::map<cudaStream_t, Stream*>& streams() {
  static auto* all = new std::map<cudaStream_t, Stream*>;
  return *all;
}

std::map<cudaEvent_t, std::shared_ptr<Event>>& events() {
  static auto* all = new std::map<cudaEvent_t, std::shared_ptr<Event>>;
  return *all;
}

Stream& stream_of(cudaStream_t handle) {
  const std::scoped_lock lock(all_mutex);
  Stream*& stream = streams()[handle];
  if (stream == nullptr) stream = new Stream;
  return *stream;
}

std::shared_ptr<Event> event_of(cudaEvent_t handle) {
  const std::scoped_lock lock(all_mutex);
  const auto found = events().find(handle);
  return found == events().end() ? nullptr : found->second;
}

}  // namespace

void enqueue(cudaStream_t stream, std::function<void()> work) { stream_of(stream).add(std::move(work)); }

std::size_t held_events() {
  const std::scoped_lock lock(all_mutex);
  return events().size();
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

void fake_cuda_capture(cudaStream_t stream, unsigned long long id) { stream_of(stream).capture = id; }

void fake_cuda_replay(cudaStream_t stream, unsigned long long id) {
  for (const std::function<void()>& work : graph_of(id)) enqueue(stream, work);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  static unsigned long long number = 0;
  const std::scoped_lock lock(all_mutex);
  *stream = reinterpret_cast<cudaStream_t>(++number * 16);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream_of(stream).drain();
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = fault("cudaDeviceSynchronize"); error != cudaSuccess) return error;
  std::map<cudaStream_t, Stream*> all;
  {
    const std::scoped_lock lock(all_mutex);
    all = streams();
  }
  for (const auto& [handle, stream] : all) stream->drain();
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
#endif
  if (const cudaError_t error = fault("cudaStreamGetCaptureInfo"); error != cudaSuccess) return error;
  *id = stream_of(stream).capture;
  *status = *id == 0 ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const cudaError_t error = fault("cudaEventCreateWithFlags"); error != cudaSuccess) return error;
  static unsigned long long number = 0;
  const std::scoped_lock lock(all_mutex);
  *event = reinterpret_cast<cudaEvent_t>(++number * 16);
  events()[*event] = std::make_shared<Event>();
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::scoped_lock lock(all_mutex);
  return events().erase(event) == 1 ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  const std::shared_ptr<Event> event = event_of(handle);
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = fault("cudaEventRecord"); error != cudaSuccess) return error;
  event->record(stream_of(stream), event);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  const std::shared_ptr<Event> event = event_of(handle);
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = fault("cudaStreamWaitEvent"); error != cudaSuccess) return error;
  return event->wait_on(stream_of(stream), event);
}
}
