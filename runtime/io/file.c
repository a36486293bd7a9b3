#include "runtime/io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/memory.h"

/* NULL for a regular file. */
static const char *irregular(mode_t mode) {
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISSOCK(mode)) return "a socket";
    if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
    return S_ISREG(mode) ? NULL : "no regular file";
}

static ml_status refuse(const char *path, const char *kind) {
    ml_fail(ML_IO, "cannot read data from %s: it is %s", path, kind);
    if (strcmp(kind, "a folder") == 0) return ml_help("name a file in it");
    return ml_help("data are read at any place and more than once: write them to a file first");
}

/* Files of /proc have content and a size of 0. */
static ml_status check_size(const ml_file *file) {
    char byte;
    if (file->bytes > 0) return ML_OK;
    ssize_t count = pread(file->descriptor, &byte, 1, 0);
    if (count < 0) return ml_fail(ML_IO, "cannot read %s: %s", file->path, strerror(errno));
    if (count == 0) return ML_OK;
    ml_fail(ML_IO, "cannot read data from %s: it has no size, as files of /proc have none",
            file->path);
    return ml_help("copy it to a file first");
}

/* The kind is looked at before the opening, which could act on a device, and after it, as the path
 * may name another file by then. Without O_NONBLOCK the opening of a pipe would wait for a writer.
 */
static ml_status open_regular(const char *path, ml_file *file) {
    struct stat status;
    if (stat(path, &status) != 0)
        return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    if (irregular(status.st_mode)) return refuse(path, irregular(status.st_mode));
    file->descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file->descriptor < 0 || fstat(file->descriptor, &status) != 0)
        return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    if (irregular(status.st_mode)) return refuse(path, irregular(status.st_mode));
    file->bytes = status.st_size;
    return check_size(file);
}

ml_status ml_file_open(const char *path, ml_file *file) {
    *file = (ml_file){.path = ml_alloc(strlen(path) + 1), .descriptor = -1};
    if (file->path == NULL) return ml_fail(ML_NO_MEMORY, "not enough host memory to open %s", path);
    strcpy(file->path, path);
    ml_status status = open_regular(path, file);
    if (status != ML_OK) ml_file_close(file);
    return status;
}

void ml_file_close(ml_file *file) {
    if (file->path == NULL) return;
    if (file->descriptor >= 0) close(file->descriptor);
    ml_free(file->path);
    *file = (ml_file){.descriptor = -1};
}

void ml_file_announce(const ml_file *file, int64_t offset, int64_t bytes) {
    posix_fadvise(file->descriptor, (off_t)offset, (off_t)bytes, POSIX_FADV_WILLNEED);
}

ml_status ml_file_read(const ml_file *file, int64_t offset, void *to, int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t count = pread(file->descriptor, (char *)to + done, (size_t)(bytes - done),
                              (off_t)(offset + done));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0)
            return ml_fail(ML_IO, "cannot read %s at byte %lld: %s", file->path,
                           (long long)(offset + done), strerror(errno));
        if (count == 0)
            return ml_fail(
                ML_IO,
                "%s ends before byte %lld: it was %lld bytes long when it was opened, and "
                "was shortened since",
                file->path, (long long)(offset + done), (long long)file->bytes);
        done += count;
    }
    return ML_OK;
}

/* ---- Known formats --------------------------------------------------------------------------- */

typedef struct {
    const char *bytes;
    int count;
    ml_file_kind kind;
} signature;

static const signature signatures[] = {
    {"\x93NUMPY", 6, {"a NumPy array (.npy)", "one of integers is read where it is called .npy"}},
    {"PK\3\4", 4, {"a zip archive, as .npz and PyTorch's .pt files are", NULL}},
    {"\x1f\x8b\x08",
     3,
     {"compressed by gzip", "it is read where it is called .txt.gz or .jsonl.gz"}},
    {"\x28\xb5\x2f\xfd",
     4,
     {"compressed by zstd", "it is read where it is called .txt.zst or .jsonl.zst"}},
    {"\xfd\x37zXZ", 5, {"compressed by xz", "xz -dc FILE > data.txt"}},
    {"\x89HDF\r\n\x1a\n", 8, {"an HDF5 file", NULL}},
    {"PAR1\x15", 5, {"a Parquet file", NULL}},
    {"ARROW1\0\0", 8, {"an Arrow file", NULL}},
    {"\x89PNG\r\n\x1a\n", 8, {"a PNG image", NULL}},
    {"SQLite format 3\0", 16, {"an SQLite database", NULL}},
    {"\x7f"
     "ELF",
     4,
     {"a compiled program", NULL}},
    {"\x80\4\x95", 3, {"a pickled Python object", NULL}},
    {"MMIDIDX\0\0",
     9,
     {"the index of a Megatron data set", "the tokens are in the .bin file beside it"}},
    {"\x88\xd8\x34\x01",
     4,
     {"a token file of llm.c with its header of 1,024 bytes",
      "it is read where it is called .bin"}},
    {"\xa1\xd9\x34\x01",
     4,
     {"a token file of llm.c with a header and u32 tokens", "it is read where it is called .bin"}},
};

static const ml_file_kind safetensors_kind = {"a safetensors file",
                                              "m.read_tensors reads it: the tensors by name"};

const ml_file_kind *ml_file_kind_of(const unsigned char head[ML_FILE_HEAD], int64_t bytes) {
    for (size_t i = 0; i < sizeof signatures / sizeof *signatures; i++) {
        const signature *s = &signatures[i];
        if (bytes >= s->count && memcmp(head, s->bytes, (size_t)s->count) == 0) return &s->kind;
    }
    uint64_t length = 0; /* of the header of a safetensors file */
    for (int i = 0; i < 8; i++) length |= (uint64_t)head[i] << 8 * i;
    bool header = bytes >= 10 && head[8] == '{' && length >= 2 && length <= (uint64_t)bytes - 8;
    return header ? &safetensors_kind : NULL;
}
