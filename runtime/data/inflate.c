#include "runtime/data/inflate.h"

#include <zlib.h>
#include <zstd.h>

#include "runtime/base/memory.h"
#include "runtime/data/store.h"

enum { BLOCK = 1 << 16 };
typedef enum { PLAIN, GZIP, ZSTD } compression;

struct inflater {
    ml_file file;
    compression kind;
    int64_t offset;      /* of the file: the end of what `block` holds */
    size_t begin, count; /* of the block: not yet decompressed */
    bool within;         /* a compressed part has begun and not ended */
    z_stream gzip;
    ZSTD_DStream *zstd;
    unsigned char block[BLOCK];
};

ml_status inflate_open(const char *path, inflater **result) {
    inflater *in = *result = ml_alloc(sizeof *in);
    if (!in) return ml_fail(ML_NO_MEMORY, "not enough host memory to read %s", path);
    in->kind = store_ends_in(path, ".gz") ? GZIP : store_ends_in(path, ".zst") ? ZSTD : PLAIN;
    ml_status status = ml_file_open(path, &in->file);
    bool made = in->kind == GZIP   ? inflateInit2(&in->gzip, 15 + 16) == Z_OK
                : in->kind == ZSTD ? (in->zstd = ZSTD_createDStream()) != NULL
                                   : true;
    if (status == ML_OK && !made)
        status = ml_fail(ML_NO_MEMORY, "not enough host memory to decompress %s", path);
    if (status == ML_OK) return ML_OK;
    inflate_close(in);
    *result = NULL;
    return status;
}

void inflate_close(inflater *in) {
    if (!in) return;
    ml_file_close(&in->file);
    if (in->kind == GZIP) inflateEnd(&in->gzip);
    ZSTD_freeDStream(in->zstd);
    ml_free(in);
}

static ml_status damaged(const inflater *in, const char *what) {
    ml_fail(ML_IO, "%s is damaged before byte %lld: %s", in->file.path,
            (long long)(in->offset - (int64_t)in->count), what ? what : "no gzip data");
    return ml_help("%s -t FILE checks it", in->kind == GZIP ? "gzip" : "zstd");
}

static ml_status refill(inflater *in) {
    int64_t rest = in->file.bytes - in->offset;
    in->begin = 0, in->count = (size_t)(rest < BLOCK ? rest : BLOCK);
    ML_TRY(ml_file_read(&in->file, in->offset, in->block, (int64_t)in->count));
    in->offset += (int64_t)in->count;
    return ML_OK;
}

static ml_status read_gzip(inflater *in, char *to, size_t room, size_t *got) {
    z_stream *z = &in->gzip;
    z->next_in = in->block + in->begin, z->avail_in = (uInt)in->count;
    z->next_out = (Bytef *)to, z->avail_out = (uInt)room;
    int code = inflate(z, Z_NO_FLUSH);
    in->begin += in->count - z->avail_in, in->count = z->avail_in;
    *got = room - z->avail_out;
    in->within = code != Z_STREAM_END;
    if (code == Z_STREAM_END)
        inflateReset(z);
    else if (code != Z_OK && code != Z_BUF_ERROR)
        return damaged(in, z->msg);
    return ML_OK;
}

static ml_status read_zstd(inflater *in, char *to, size_t room, size_t *got) {
    ZSTD_inBuffer from = {in->block + in->begin, in->count, 0};
    ZSTD_outBuffer out = {to, room, 0};
    size_t code = ZSTD_decompressStream(in->zstd, &out, &from);
    in->begin += from.pos, in->count -= from.pos;
    *got = out.pos;
    in->within = code != 0;
    return ZSTD_isError(code) ? damaged(in, ZSTD_getErrorName(code)) : ML_OK;
}

ml_status inflate_read(inflater *in, char *to, size_t room, size_t *got) {
    *got = 0;
    if (room > BLOCK) room = BLOCK;
    if (in->kind == PLAIN) {
        int64_t rest = in->file.bytes - in->offset;
        size_t count = rest < (int64_t)room ? (size_t)rest : room;
        ML_TRY(ml_file_read(&in->file, in->offset, to, (int64_t)count));
        in->offset += (int64_t)count, *got = count;
        return ML_OK;
    }
    for (bool ended = false; *got == 0;) {
        if (in->count == 0 && !ended) {
            ML_TRY(refill(in));
            ended = in->count == 0;
        }
        if (in->count == 0 && !in->within) return ML_OK;
        ML_TRY(in->kind == GZIP ? read_gzip(in, to, room, got) : read_zstd(in, to, room, got));
        if (ended && *got == 0 && in->within) return damaged(in, "it ends within compressed data");
    }
    return ML_OK;
}
