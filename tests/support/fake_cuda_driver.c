/* What Triton's launchers call of CUDA's driver, without a device: launches are told to a function of the test. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int Result;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    void *attributes;
    unsigned count;
} Config;

static uintptr_t handles = 16;

void (*told)(const Config *, void *function, void **arguments) = NULL;

Result cuGetErrorString(int code, const char **text) { *text = "fake"; return 0; }
Result cuDeviceGet(int *device, int number) { *device = number; return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 97 ? 232448 : attribute == 8 ? 49152 : attribute == 10 ? 32 : 132;
    return 0;
}
Result cuCtxGetCurrent(void **context) { *context = &handles; return 0; }
Result cuCtxSetCurrent(void *context) { return 0; }
Result cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
Result cuCtxSetLimit(int limit, size_t value) { return 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = &handles; return 0; }
Result cuModuleLoadData(void **module, const void *data) { *module = (void *)(handles += 16); return 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)(handles += 16); return 0; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
Result cuFuncSetCacheConfig(void *function, int value) { return 0; }
Result cuOccupancyMaxActiveClusters(int *count, void *function, void *config) { *count = 1; return 0; }
Result cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) {
    *(unsigned long long *)value = pointer;
    return 0;
}

/* A descriptor is what it was made of. */
Result cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *start, const uint64_t *sizes,
                              const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                              int swizzle, int promotion, int fill) {
    uint64_t *words = map;
    memset(map, 0, 128);
    words[0] = (uint64_t)start;
    words[1] = (uint64_t)type << 32 | (uint64_t)rank << 16 | (uint64_t)swizzle << 8 | (uint64_t)fill;
    for (uint32_t n = 0; n < rank; n++) {
        words[2 + n] = sizes[n];
        words[7 + n] = n + 1 < rank ? strides[n] : 0;
        ((uint32_t *)(words + 12))[n] = box[n];
    }
    return 0;
}

Result cuLaunchKernelEx(const Config *config, void *function, void **arguments, void **extra) {
    if (told) told(config, function, arguments);
    return 0;
}
