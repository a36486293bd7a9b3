/* libnvrtc for the emulator: "compiles" a kernel to a shared object for this machine.
 *
 * Inline PTX becomes calls of device.hh, dynamic shared memory a pointer, and each kernel gets an
 * entry NAME__run(arguments) and its arguments' size, NAME__bytes. The image is a magic word, its
 * size and the object's bytes. */
#include <ctype.h>
#include <nvrtc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct _nvrtcProgram {
    char *source, *image, *log;
    size_t bytes;
};
typedef struct {
    const char *opcode, *call; /* %0 to %9 are operands, # the number behind the opcode */
} ptx_form;
static const ptx_form forms[] = {
    {"cvt.rn.bf16.f32", "%0 = emu_to_bf16(%1);"},
    {"cvt.rn.bf16x2.f32", "%0 = emu_pair(%1, %2);"},
    {"cvt.rn.f16x2.f32", "%0 = emu_halves(%1, %2)"},
    {"cvt.rn.f16.f32", "%0 = emu_bits<uint16_t>((_Float16)%1);"},
    {"cvt.f32.f16", "%0 = emu_of_f16(%1);"},
    {"{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }", "%0 = emu_of_f16(%1)"},
    {"{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }", "%0 = emu_of_f16(%1 >> 16)"},
    {"ex2.approx.ftz.f32", "%0 = exp2f(%1);"},
    {"tanh.approx.f32", "%0 = tanhf(%1);"},
    {"fma.rn.bf16x2", "%0 = emu_fma_pair(%1, %2, %3);"},
    {"max.NaN.f32", "%0 = emu_max(%1, %2);"},
    {"max.NaN.bf16x2", "%0 = emu_max_pair(%1, %2);"},
    {"min.NaN.f32", "%0 = emu_min(%1, %2);"},
    {"red.release.gpu.global.add.u32", "++*(%0);"},
    {"ld.acquire.gpu.global.u32", "%0 = emu_look(%1);"},
    {"bar.sync", "emu_barrier(%0, %1);"},
    {"cp.async.cg.shared.global", "emu_copy_later(%0, %1, %2);"},
    {"cp.async.commit_group;", "emu_copy_commit();"},
    {"cp.async.wait_all;", "emu_copy_wait(-1);"},
    {"cp.async.wait_group", "emu_copy_wait(#);"},
    {"fence.proxy.async.shared::cta;", ";"},
    {"griddepcontrol.wait;", ";"}, /* launches do not overlap */
    {"griddepcontrol.launch_dependents;", ";"},
    {"prefetch.global.L2", ";"},
    {"wgmma.fence.sync.aligned;", ";"},
    {"wgmma.commit_group.sync.aligned;", "emu_products_commit();"},
    {"wgmma.wait_group.sync.aligned", "emu_products_wait(#);"},
    {"setmaxnreg.dec.sync.aligned.u32", ";"},
    {"setmaxnreg.inc.sync.aligned.u32", ";"},
    {"", ";"}, /* the compiler alone sees it */
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "emu_load_matrices(%0, %1, %2, %3, %4, false);"},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
     "emu_load_matrices(%0, %1, %2, %3, %4, true);"},
    {"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "emu_store_transposed(%0, %1, %2, %3, %4);"},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
     "emu_multiply(%0, %1, %2, %3, %4, %5, %6, %7, %8, %9);"},
};

/* Past the parenthesis that closes the one before `at`; quoted text does not count. */
static const char *past_closing(const char *at) {
    for (int depth = 1, quoted = 0; depth > 0 && *at; at++) {
        if (*at == '"') quoted = !quoted;
        if (!quoted) depth += (*at == '(') - (*at == ')');
    }
    return at;
}

/* wgmma: its operands are the parameters of the function around it; how they lie and how many
 * columns there are is said by its last immediates and its name, or by the parameters of the macros
 * of codegen/kernels/cuda/wgmma.cuh. */
static int print_product(FILE *out, const char *begin, const char *end) {
    static const char name[] = "wgmma.mma_async.sync.aligned.m64n", before[] = "p, 1, 1, ";
    const char *at = strstr(begin, name);
    int left, right;
    if (!at || at > end) return 0;
    if (!strncmp(at + strlen(name), "\" #COLUMNS", 10)) {
        const char *held = strstr(at, "(a0)");
        if (held && held < end)
            fprintf(out, "emu_held_product(c, a0, a1, a2, a3, right, RIGHT_FLAT, COLUMNS, add);");
        else
            fprintf(out, "emu_product_later(c, left, right, LEFT_FLAT, RIGHT_FLAT, COLUMNS, add);");
        return 1;
    }
    if (strncmp(at + strlen(name), "256k16.f32.bf16.bf16", 20)) return 0;
    if (!(at = strstr(at, before)) || at > end) return 0;
    if (sscanf(at + strlen(before), "%d, %d", &left, &right) != 2) return 0;
    fprintf(out, "emu_product_later(c, left, right, %d, %d, 256, 1);", left, right);
    return 1;
}

/* Print the call for an asm statement whose operands lie in begin .. end; 0 for unknown PTX. */
static int print_ptx(FILE *out, const char *begin, const char *end) {
    const char *operand[16], *stop[16], *opcode = strchr(begin, '"') + 1;
    size_t length = strcspn(opcode, *opcode == '{' ? "\"" : " \""); /* of several: all of them */
    int count = 0;
    if (print_product(out, begin, end)) return 1;
    for (const char *at = begin; at < end && count < 16; at++) {
        if (*at != '"' || at[1] == ' ') continue;
        const char *close = strchr(at + 1, '"'), *open = close + 1;
        while (isspace((unsigned char)*open)) open++;
        if (close - at <= 3 && *open == '(') {
            operand[count] = open + 1;
            stop[count++] = past_closing(open + 1) - 1;
        }
        at = close;
    }
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (strlen(forms[i].opcode) != length || strncmp(opcode, forms[i].opcode, length)) continue;
        for (const char *c = forms[i].call; *c; c++) {
            if (*c == '#') {
                fprintf(out, "%d", atoi(opcode + length));
                continue;
            }
            int which = *c == '%' ? *++c - '0' : -1;
            if (which < 0)
                fputc(*c, out);
            else if (which < count)
                fprintf(out, "%.*s", (int)(stop[which] - operand[which]), operand[which]);
        }
        return 1;
    }
    return 0;
}

static int is_word(char c) {
    return isalnum((unsigned char)c) || c == '_';
}

/* extern __shared__ TYPE NAME[]; */
static const char *print_shared(FILE *out, const char *at) {
    const char *end = strchr(at, ';'), *name_end = strchr(at, '['), *name = name_end;
    const char *type = at + strlen("extern __shared__");
    while (is_word(name[-1])) name--;
    fprintf(out, "static %.*s *const %.*s = (%.*s *)emu_dynamic_shared", (int)(name - type), type,
            (int)(name_end - name), name, (int)(name - type), type);
    return end;
}

/* Of a kernel of a file, which is in a namespace of its own. */
static void print_run_of_file(FILE *out, const char *source, const char *type) {
    const char *name = strstr(source, "#define ENTRY ") + 14;
    int n = (int)strcspn(name, "\n");
    fprintf(out, "\nnamespace %.*s_kernel {\n", n, name);
    fprintf(out, "extern \"C\" void %.*s__run(void *a) { %.*s(*(%s *)a); }\n", n, name, n, name,
            type);
    fprintf(out, "extern \"C\" const unsigned %.*s__bytes = sizeof(%s);\n}\n", n, name, type);
}

static void print_source(FILE *out, const char *source) {
    fprintf(out, "#include \"device.hh\"\n");
    for (const char *at = source; *at;) {
        if (!strncmp(at, "extern __shared__", 17)) {
            at = print_shared(out, at);
        } else if (!strncmp(at, "asm", 3) && !is_word(at[3]) &&
                   (at == source || !is_word(at[-1]))) {
            const char *begin = strchr(at, '(') + 1, *end = past_closing(begin);
            if (!print_ptx(out, begin, end)) fprintf(out, "unknown_ptx(%.60s);", begin);
            at = end;
        } else
            fputc(*at++, out);
    }
    /* extern "C" __global__ void __launch_bounds__(N) NAME(TYPE a) */
    for (const char *at = source; (at = strstr(at, "__global__ void")) != NULL; at++) {
        char type[128];
        const char *p = at + 15;
        while (*p == ' ') p++;
        if (!strncmp(p, "__launch_bounds__", 17)) p = past_closing(strchr(p, '(') + 1);
        while (*p == ' ') p++;
        int length = (int)strcspn(p, "(");
        const char *argument = p + length + 1;
        if (!strncmp(argument, "const ", 6)) argument += 6;
        if (!strncmp(argument, "__grid_constant__ ", 18)) argument += 18;
        sscanf(argument, "%127[A-Za-z0-9_]", type);
        if (!strncmp(p, "ENTRY(", 6)) {
            print_run_of_file(out, source, type);
            break; /* others are alternatives of the preprocessor */
        }
        fprintf(out, "\nextern \"C\" void %.*s__run(void *a) { %.*s(*(%s *)a); }\n", length, p,
                length, p, type);
        fprintf(out, "extern \"C\" const unsigned %.*s__bytes = sizeof(%s);\n", length, p, type);
    }
}

static char *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    *bytes = 0;
    if (!file) return calloc(1, 1);
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    text = calloc(1, *bytes + 1);
    *bytes = fread(text, 1, *bytes, file);
    fclose(file);
    return text;
}

static void keep_image(nvrtcProgram p, const char *object) {
    size_t bytes;
    char *text = read_file(object, &bytes);
    p->bytes = bytes + 16;
    p->image = malloc(p->bytes);
    memcpy(p->image, "EMULATED", 8);
    memcpy(p->image + 8, &bytes, 8);
    memcpy(p->image + 16, text, bytes);
    free(text);
}

nvrtcResult nvrtcCompileProgram(nvrtcProgram p, int count, const char *const *options) {
    const char *home = getenv("EMULATOR"); /* the folder of the libraries and of device.hh */
    char folder[] = "/tmp/mlua-emulator-XXXXXX", source[64], object[64], log[64], command[1024];
    size_t bytes;
    (void)count, (void)options;
    if (!home || !mkdtemp(folder)) return NVRTC_ERROR_INTERNAL_ERROR;
    snprintf(source, sizeof source, "%s/k.cc", folder);
    snprintf(object, sizeof object, "%s/k.so", folder);
    snprintf(log, sizeof log, "%s/log", folder);
    FILE *file = fopen(source, "w");
    print_source(file, p->source);
    fclose(file);
    snprintf(command, sizeof command,
             "c++ -std=c++17 -O1 -w -fno-strict-aliasing -ffp-contract=off -shared -fPIC -I%s %s "
             "%s/libcuda.so.1 -o %s >%s 2>&1",
             home, source, home, object, log);
    int status = system(command);
    p->log = read_file(log, &bytes);
    if (status == 0) keep_image(p, object);
    unlink(object);
    unlink(log);
    unlink(source);
    rmdir(folder);
    return status == 0 ? NVRTC_SUCCESS : NVRTC_ERROR_COMPILATION;
}

nvrtcResult nvrtcVersion(int *major, int *minor) {
    *major = 0, *minor = 1;
    return NVRTC_SUCCESS;
}
const char *nvrtcGetErrorString(nvrtcResult result) {
    return result ? "NVRTC_ERROR_EMULATED" : "NVRTC_SUCCESS";
}
nvrtcResult nvrtcCreateProgram(nvrtcProgram *p, const char *source, const char *name, int count,
                               const char *const *headers, const char *const *names) {
    (void)name, (void)count, (void)headers, (void)names;
    *p = calloc(1, sizeof **p);
    (*p)->source = strdup(source);
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram *p) {
    free((*p)->source);
    free((*p)->image);
    free((*p)->log);
    free(*p);
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram p, size_t *bytes) {
    *bytes = strlen(p->log ? p->log : "") + 1;
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLog(nvrtcProgram p, char *log) {
    strcpy(log, p->log ? p->log : "");
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram p, size_t *bytes) {
    *bytes = p->bytes;
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBIN(nvrtcProgram p, char *image) {
    memcpy(image, p->image, p->bytes);
    return NVRTC_SUCCESS;
}
