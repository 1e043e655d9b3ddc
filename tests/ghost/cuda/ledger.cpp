#include "ledger.h"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

namespace {

// Never freed: libraries call until the very end of the process.
std::mutex& lock() {
    static auto* made = new std::mutex;
    return *made;
}
std::vector<std::string>& events() {
    static auto* made = new std::vector<std::string>;
    return *made;
}
bool recording = false;
thread_local int paused = 0;

// A kernel's name as it is written in C++; library calls and kernels of Triton have plain names.
std::string readable(const std::string& event) {
    const char* prefix = "kernel:_Z";
    if (event.compare(0, strlen(prefix), prefix) != 0) return event;
    int status = 0;
    char* name = abi::__cxa_demangle(event.c_str() + strlen("kernel:"), nullptr, nullptr, &status);
    std::string text = status == 0 ? std::string("kernel:") + name : event;
    free(name);
    return text;
}

double number_from(const char* variable, double otherwise) {
    const char* text = getenv(variable);
    return text ? atof(text) : otherwise;
}

}  // namespace

namespace ghost {

void note(const std::string& event) {
    std::lock_guard<std::mutex> guard(lock());
    if (recording && !paused) events().push_back(event);
}

void refuse(const char* name) {
    static auto* told = new std::set<std::string>;
    std::lock_guard<std::mutex> guard(lock());
    if (told->insert(name).second) fprintf(stderr, "ghost CUDA: %s isn't covered\n", name);
}

int devices() { return static_cast<int>(number_from("GHOST_DEVICES", 8)); }

size_t memory_limit() {
    static const size_t bytes = static_cast<size_t>(number_from("GHOST_MEMORY_GB", 79.1) * (1ull << 30));
    return bytes;
}

}  // namespace ghost

GHOST void ghost_start() {
    std::lock_guard<std::mutex> guard(lock());
    events().clear();
    recording = true;
}

GHOST void ghost_pause(int on) { paused = on; }

GHOST void ghost_mark(const char* text) { ghost::note(std::string("mark:") + text); }

GHOST int ghost_write(const char* path) {
    std::lock_guard<std::mutex> guard(lock());
    recording = false;
    FILE* file = fopen(path, "w");
    if (!file) return 1;
    for (const auto& event : events()) fprintf(file, "%s\n", readable(event).c_str());
    return fclose(file);
}

// What the stubs call that build.py writes.
GHOST void ghost_refuse(const char* name) { ghost::refuse(name); }
