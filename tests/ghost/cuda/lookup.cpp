// dlsym: libraries that open NVIDIA's by name get the ghost's functions, too.
#include <dlfcn.h>

#include <cstring>
#include <initializer_list>

namespace {

using Lookup = void* (*)(void*, const char*);

Lookup real_lookup() {
    static auto found = reinterpret_cast<Lookup>(dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34"));
    static auto older = reinterpret_cast<Lookup>(dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
    return found ? found : older;
}

// The handle of this library.
void* ghost_library() {
    static void* handle = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(&ghost_library), &info);
        return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }();
    return handle;
}

bool of_nvidia(const char* name) {
    for (const char* prefix : {"cuda", "cublas", "cudnn", "nccl", "nvrtc"})
        if (strncmp(name, prefix, strlen(prefix)) == 0) return true;
    return strncmp(name, "cu", 2) == 0 && name[2] >= 'A' && name[2] <= 'Z';
}

// dlsym on a handle searches what that library was linked with, too.
bool is_ours(void* address) {
    Dl_info theirs, ours;
    return dladdr(address, &theirs) && dladdr(reinterpret_cast<void*>(&ghost_library), &ours) &&
           theirs.dli_fbase == ours.dli_fbase;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void* dlsym(void* handle, const char* name) noexcept {
    if (handle != RTLD_NEXT && of_nvidia(name)) {
        void* address = real_lookup()(ghost_library(), name);
        if (address && is_ours(address)) return address;
    }
    return real_lookup()(handle, name);
}
