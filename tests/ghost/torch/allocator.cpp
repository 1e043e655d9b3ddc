// Tells the ghost what torch's allocator takes back: nothing is known any more of what stands there.
#include <c10/cuda/CUDACachingAllocator.h>

extern "C" void ghost_forget(void* address, size_t bytes);

extern "C" __attribute__((visibility("default"))) void ghost_attach() {
    using Entry = c10::CachingDeviceAllocator::TraceEntry;
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const Entry& entry) {
        if (entry.action_ == Entry::FREE_COMPLETED) ghost_forget(reinterpret_cast<void*>(entry.addr_), entry.size_);
    });
}
