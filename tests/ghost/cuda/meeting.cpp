#include "meeting.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "ledger.h"

namespace {

std::string path_of(const std::string& name) {
    const char* folder = getenv("GHOST_FOLDER");
    return std::string(folder ? folder : "/tmp") + "/" + name;
}

double patience() {
    const char* text = getenv("GHOST_PATIENCE");
    return text ? atof(text) : 120;
}

}  // namespace

namespace ghost {

void put(const std::string& name, const void* data, size_t bytes, bool object) {
    std::string path = path_of(name), beside = path + "." + std::to_string(getpid());
    bool known = object || is_known(data, bytes) || place_of(data) != Place::device;
    std::vector<char> zeros(bytes, 0);
    FILE* file = fopen(beside.c_str(), "wb");
    if (!file) {
        perror(("ghost CUDA: " + beside).c_str());
        return;
    }
    fputc(known ? 1 : 0, file);
    fwrite(known ? data : zeros.data(), 1, bytes, file);
    fclose(file);
    rename(beside.c_str(), path.c_str());
}

bool take(const std::string& name, Payload* out) {
    std::string path = path_of(name);
    useconds_t pause = 100;
    for (double waited = 0; waited < patience(); waited += pause * 1e-6) {
        if (FILE* file = fopen(path.c_str(), "rb")) {
            struct stat found;
            fstat(fileno(file), &found);
            out->known = fgetc(file) == 1;
            out->bytes.resize(found.st_size - 1);
            size_t read = fread(out->bytes.data(), 1, out->bytes.size(), file);
            fclose(file);
            return read == out->bytes.size();
        }
        usleep(pause);
        if (pause < 10000) pause *= 2;
    }
    fprintf(stderr, "ghost CUDA: no other rank came to %s\n", name.c_str());
    return false;
}

}  // namespace ghost
