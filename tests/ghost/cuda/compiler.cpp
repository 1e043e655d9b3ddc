// NVRTC: programs are never compiled. A kernel's name is what was asked for.
#include <nvrtc.h>

#include <cstdlib>
#include <cstring>

#include "ledger.h"

GHOST nvrtcResult nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcGetNumSupportedArchs(int* count) { return *count = 1, NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcGetSupportedArchs(int* archs) { return archs[0] = 90, NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char*, const char* name, int, const char* const*,
                                     const char* const*) {
    *program = reinterpret_cast<nvrtcProgram>(strdup(name ? name : "program"));
    return NVRTC_SUCCESS;
}
GHOST nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) { return free(*program), NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcAddNameExpression(nvrtcProgram, const char*) { return NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, const char* const*) { return NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t* bytes) { return *bytes = 1, NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char* text) { return *text = 0, NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t* bytes) { return *bytes = 64, NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char* code) { return memset(code, 0, 64), NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcGetPTXSize(nvrtcProgram, size_t* bytes) { return *bytes = 64, NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcGetPTX(nvrtcProgram, char* code) { return memset(code, 0, 64), NVRTC_SUCCESS; }
GHOST nvrtcResult nvrtcGetLoweredName(nvrtcProgram, const char* name, const char** lowered) {
    return *lowered = strdup(name), NVRTC_SUCCESS;
}
GHOST const char* nvrtcGetErrorString(nvrtcResult) { return "an error of ghost CUDA's NVRTC"; }
