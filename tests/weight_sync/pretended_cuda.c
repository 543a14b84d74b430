/* CUDA's driver as far as cuda_driver.py calls it, over host memory, with cuda.h's signatures. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned char reserved[64]; } Handle;

static struct { uint64_t base; size_t size; } found[64];
static int num_found, depth, context, refuse;

int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = i;
    return device;
}
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = &context; return device; }
int cuCtxPushCurrent_v2(void *given) { depth++; return given != &context; }
int cuCtxPopCurrent_v2(void **out) { *out = &context; depth--; return 0; }
int cuGetErrorString(int status, const char **text) {
    *text = status == 2 ? "out of memory" : status == 400 ? "invalid resource handle" : "other";
    return 0;
}
int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    if (!depth) return 201;
    if (size >= (size_t)1 << 30) return 2;
    *pointer = (uint64_t)aligned_alloc(4096, size);
    found[num_found].base = *pointer;
    found[num_found++].size = size;
    return 0;
}
static int at(uint64_t pointer) {
    for (int i = 0; i < num_found; i++)
        if (pointer >= found[i].base && pointer < found[i].base + found[i].size) return i;
    return -1;
}
int cuMemFree_v2(uint64_t pointer) {
    int i = at(pointer);
    if (i < 0 || found[i].base != pointer) return 1;
    free((void *)pointer);
    found[i].base = found[i].size = 0;
    return 0;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t pointer) {
    int i = at(pointer);
    if (!depth || i < 0) return 1;
    *base = found[i].base;
    *size = found[i].size;
    return 0;
}
void refuse_as(int kind) { refuse = kind; } /* 0 nothing, 8 managed, 17 of a pool, 1 virtual */
int cuPointerGetAttribute(void *value, int which, uint64_t pointer) {
    if (!depth || at(pointer) < 0) return 1;
    if (which == 8 || which == 10) *(int *)value = which == 10 ? !refuse : refuse == 8;
    else if (which == 17) *(void **)value = refuse == 17 ? &context : NULL;
    else return 1;
    return 0;
}
int cuIpcGetMemHandle(Handle *handle, uint64_t base) {
    if (!depth || at(base) < 0) return 400;
    for (int i = 0; i < 64; i++) handle->reserved[i] = i + 1;
    memcpy(handle->reserved, &base, sizeof base);
    return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t *pointer, Handle handle, unsigned flags) {
    if (!depth || flags != 1) return 1;
    for (int i = 8; i < 64; i++)
        if (handle.reserved[i] != i + 1) return 400;
    memcpy(pointer, handle.reserved, sizeof *pointer);
    return at(*pointer) < 0 ? 400 : 0;
}
int cuIpcCloseMemHandle(uint64_t pointer) { return !depth || at(pointer) < 0; }
int num_pushed(void) { return depth; }
