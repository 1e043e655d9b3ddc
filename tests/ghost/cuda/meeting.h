// Where the ranks of a run meet: small payloads of collectives are handed over by files in GHOST_FOLDER.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ghost {

// Payloads up to this size are handed over for real: sizes, flags, pickled objects' lengths, choices of routers. Larger
// ones are tensors, in which there is nothing.
constexpr size_t kMeeting = 4096;
// Objects are handed over up to this size: what a checkpoint holds is told so.
constexpr size_t kObjects = 4 << 20;

struct Payload {
    bool known;  // came from the host of its rank; what its GPU computed is zeros
    std::vector<char> bytes;
};

// Puts a payload where another rank finds it under the same name. All of it counts as known where it is an object.
void put(const std::string& name, const void* data, size_t bytes, bool object);
// Waits for a payload; false, and a word on stderr, after GHOST_PATIENCE seconds (120).
bool take(const std::string& name, Payload* out);

}  // namespace ghost
