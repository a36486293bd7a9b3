#ifdef MLUA_CUDA
/* Tensor maps: how Hopper's copy engine finds its way in an operand (codegen/kernel.h). The driver
 * encodes them; they are a part of a kernel's arguments, so that a graph of the step holds them. */
#include <string.h>

#include "runtime/device/cuda/cuda_internal.h"

static bool has_maps(const ml_kernel *chain) {
    for (; chain; chain = chain->next)
        if (chain->map_count > 0) return true;
    return false;
}

void cuda_maps_choose(cuda_step *step) {
    while (has_maps(step->kernel) && !cuda.cuTensorMapEncodeTiled) {
        if (!step->kernel->fallback) {
            ml_fail(ML_DEVICE, "the NVIDIA driver is too old: it has no cuTensorMapEncodeTiled");
            ml_help("install driver 525 or newer, or run with --device cpu");
            ml_raise_last();
        }
        step->kernel = step->kernel->fallback;
    }
}

static CUtensorMapDataType type_of(ml_dtype dtype) {
#define NONE CU_TENSOR_MAP_DATA_TYPE_UINT8 /* kernels do not copy these */
    static const CUtensorMapDataType types[ML_DTYPE_COUNT] = {
#define ML_DTYPE(ident, name, bytes, kind, compute, promotion, digits, least, largest, host, from, \
                 to, memory, load, store, file, cuda, nccl, tensor_map, doc)                       \
    [ML_##ident] = tensor_map,
#include "runtime/graph/dtypes.def"
#undef ML_DTYPE
#undef NONE
    };
    return types[dtype];
}

static CUtensorMapSwizzle swizzle_of(int bytes) {
    return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
           : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
           : bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                         : CU_TENSOR_MAP_SWIZZLE_NONE;
}

static ml_status encode(const ml_tensor_map *map, void *address, CUtensorMap *encoded) {
    cuuint64_t size[ML_MAP_AXES], stride[ML_MAP_AXES]; /* bytes, of all axes but the innermost */
    cuuint32_t box[ML_MAP_AXES], steps[ML_MAP_AXES];
    for (int i = 0; i < map->rank; i++) {
        size[i] = (cuuint64_t)map->size[i];
        box[i] = (cuuint32_t)map->box[i];
        steps[i] = 1;
        if (i > 0) stride[i - 1] = (cuuint64_t)(map->stride[i] * ml_dtypes[map->dtype].bytes);
    }
    CUDA_TRY(cuTensorMapEncodeTiled(
        encoded, type_of((ml_dtype)map->dtype), (cuuint32_t)map->rank, address, size, stride, box,
        steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(map->swizzle),
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return ML_OK;
}

ml_status cuda_maps_bind(cuda_launch *launch) {
    const ml_kernel *kernel = launch->kernel;
    _Static_assert(sizeof(CUtensorMap) == ML_MAP_BYTES, "kernels know the size of a tensor map");
    for (int i = 0; i < kernel->map_count; i++) {
        CUtensorMap encoded; /* the driver wants it aligned */
        ML_TRY(encode(&kernel->maps[i], launch->pointers[kernel->maps[i].pointer], &encoded));
        memcpy((char *)launch->arguments + (size_t)i * ML_MAP_BYTES, &encoded, sizeof encoded);
    }
    return ML_OK;
}
#endif
