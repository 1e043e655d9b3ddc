// What a process asks of its ghost GPU, by name and in order.
//
// An event is one line: `kind:what`, e.g. `kernel:void vectorized_elementwise_kernel<...>`, `copy:D2H pageable 4`,
// `sync:cudaStreamSynchronize`. Kinds: kernel, gemm, cudnn, nccl, copy, memset, sync, event, mark.
#pragma once

#include <cstddef>
#include <string>

#define GHOST extern "C" __attribute__((visibility("default")))

namespace ghost {

// Writes an event down, where the process is being recorded.
void note(const std::string& event);
// Says on stderr what the ghost can't do, once for each name.
void refuse(const char* name);

// GHOST_DEVICES: how many GPUs the process sees (8).
int devices();
// The GPU that is current in this thread.
int current_device();
// GHOST_MEMORY_GB: memory of each in bytes (79.1, an H100's).
size_t memory_limit();

enum class Place { unknown, device, pinned };
// Where an address lies that the ghost has handed out.
Place place_of(const void* address);
// Device memory that no kernel has written since `bytes` of it came from the host or from another rank: it may be
// read back. All else reads as zeros, since nothing is computed.
void set_known(const void* address, size_t bytes);
bool is_known(const void* address, size_t bytes);

}  // namespace ghost

// Begins anew, and records from here on.
GHOST void ghost_start();
// Leaves out what this thread does until it is called with 0: what only the ghost needs.
GHOST void ghost_pause(int paused);
// Puts an event of the caller's own between the others.
GHOST void ghost_mark(const char* text);
// Writes all events since ghost_start to a file, a line each, and ends the recording.
GHOST int ghost_write(const char* path);
// The name that a communicator of NCCL has in events.
struct ncclComm;
GHOST const char* ghost_name_of(const ncclComm* comm);
