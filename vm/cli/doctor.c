#include "vm/cli/doctor.h"

#include <stdio.h>
#include <string.h>

#include "vm/check/bench.h"

static void print_body(void *argument) {
    ml_text *text = argument;
    ml_device_doctor(text);
    fputs(text->text ? text->text : "", stdout);
}

bool doctor_print(void) {
    ml_text text = {.arena = ml_arena_new()};
    ml_status status = text.arena ? ml_protect(print_body, &text)
                                  : ml_fail(ML_NO_MEMORY, "not enough host memory");
    ml_arena_free(text.arena);
    return status == ML_OK;
}

static bool report_error(void) {
    const ml_error *error = ml_error_last();
    fprintf(stderr, "mlua: %s\n", error->text);
    if (error->help[0]) fprintf(stderr, "  help: %s\n", error->help);
    return false;
}

static bool bench_device(const char *title, const char *device) {
    ml_ceilings found;
    if (ml_bench(device, 0, true, &found) != ML_OK) return report_error();
    printf("%-12s copy %.1f GB/s (read + written), %s GEMM %.4g TFLOP/s (%lld x %lld x %lld)\n",
           title, found.copy_bytes * 1e-9, ml_dtypes[ml_bench_dtype(device)].name,
           found.gemm_flops * 1e-12, (long long)found.gemm_size, (long long)found.gemm_size,
           (long long)found.gemm_size);
    if (found.host_both > 0)
        printf("%-12s %.1f GB/s to pinned host memory, %.1f back, %.1f each way at once\n", "",
               found.host_out * 1e-9, found.host_back * 1e-9, found.host_both * 1e-9);
    fflush(stdout);
    return true;
}

bool doctor_bench(void) {
    bool good = bench_device("CPU bench", "cpu");
    if (doctor_gpus() > 0) good &= bench_device("GPU bench", "cuda");
    return good;
}

int doctor_gpus(void) {
#ifdef MLUA_CUDA
    return ml_cuda_count();
#else
    return 0;
#endif
}

bool doctor_rank(const ml_launch *launch) {
    ml_comm *comm = NULL;
    double bus_bytes = 0;
    int64_t bytes = 0;
    if (ml_comm_open(launch, &comm) != ML_OK) return report_error();
    bool good = ml_bench_all_reduce(comm, &bus_bytes, &bytes) == ML_OK;
    if (!good && ml_comm_fail(comm, ml_error_last()->text)) report_error();
    if (good && launch->rank == 0)
        printf("%-12s %.1f GB/s on the bus among %d %s (%.1f MiB)\n", "all-reduce",
               bus_bytes * 1e-9, launch->world, doctor_gpus() > 0 ? "GPUs" : "CPU ranks",
               (double)bytes / (1 << 20));
    ml_comm_close(comm);
    return good;
}
