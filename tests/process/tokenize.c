/* mlua tokenize: arrays of ids, files of tokens, what a stopped run left. */
#include <string.h>

#include "tests/process/support.h"

PROCESS_TEST(tokenize_prints_ids) {
    process_write(room, "a.jsonl",
                  "{\"text\": \"hi\"}\n{\"text\": \"\"}\n"
                  "{\"text\": \"\\u00e9\"}\n");
    process_result r = process_run(room, 0, "", "tokenize bytes a.jsonl --json");
    CHECK_TEXT(r.output, "[104,105]\n[]\n[195,169]\n");
    r = process_run(room, 2, "", "tokenize bytes --json");
    process_expect(&r, "tokenize needs a tokenizer, text files, and either --json or -o");
    r = process_run(room, 1, "", "tokenize bytes a.jsonl -o a.tokens");
    process_expect(&r, "a.tokens is no name of a file of tokens");
    r = process_run(room, 1, "", "tokenize none.json a.jsonl --json");
    process_expect(&r, "none.json");
    process_write(room, "a.html", "hi");
    r = process_run(room, 1, "", "tokenize bytes a.html --json");
    process_expect(&r, "a.html is no text file by its name");
}

PROCESS_TEST(tokenize_resumes) {
    process_write(room, "a.txt", "ab");
    process_result r = process_run(room, 1, "", "tokenize bytes a.txt b.txt -o out.bin");
    process_expect(&r, "b.txt");
    r = process_shell(room, 1, "test -e out.bin");
    process_write(room, "b.txt", "c");
    r = process_run(room, 0, "", "tokenize bytes a.txt b.txt -o out.bin");
    process_expect(&r, "a.txt: done before");
    process_expect(&r, "b.txt: 0.0 MB, 1 tokens");
    r = process_shell(room, 0, "od -An -tu2 out.bin | tr -s ' '; ls -d out.*");
    CHECK_TEXT(r.output, " 97 98 99\nout.bin\n");
    r = process_run(room, 0, "", "tokenize bytes a.txt b.txt -o both.idx --quiet");
    CHECK_TEXT(r.output, "");
    r = process_shell(room, 0, "wc -c <both.bin; wc -c <both.idx; printf %%s x | gzip >c.txt.gz");
    r = process_run(room, 0, "", "tokenize bytes c.txt.gz --json");
    CHECK_TEXT(r.output, "[120]\n");
}

/* Files without documents, small ones together, and those before a line that is wrong. */
PROCESS_TEST(tokenize_many_files) {
    process_shell(room, 0,
                  "for i in 1 2 3 4; do printf %%s $i >$i.txt; done; : >none.jsonl; : >none.txt");
    process_write(room, "lines.jsonl",
                  "{\"text\": \"a\\u00e9\\n\"}\n\n{\"x\": [1], \"text\": \"\\ud83d\\ude00\"}");
    process_write(room, "wrong.jsonl", "{\"text\": \"b\"}\n{\"text\": \"b\\ud800\"}\n");
    process_run(room, 0, "",
                "tokenize bytes none.jsonl 1.txt 2.txt none.txt 3.txt lines.jsonl 4.txt none.jsonl "
                "-o all.idx --quiet");
    process_result r =
        process_shell(room, 0,
                      "od -An -tu2 all.bin | tr -s ' \n' ' '; od -An -j34 -N24 -tu4 all.idx | "
                      "tr -s ' \n' ' '; ls -d all.*");
    CHECK_TEXT(r.output, " 49 50 51 97 195 169 10 240 159 152 128 52  1 1 1 4 4 1 all.bin\n"
                         "all.idx\n");
    r = process_run(room, 1, "", "tokenize bytes 1.txt 2.txt wrong.jsonl 3.txt -o new.bin");
    process_expect(&r, "wrong.jsonl, line 2, byte ");
    r = process_run(room, 1, "", "tokenize bytes 1.txt 2.txt missing.txt 3.txt -o new.bin");
    process_expect(&r, "missing.txt");
    r = process_run(room, 0, "", "tokenize bytes 1.txt 2.txt 3.txt -o new.bin");
    process_expect(&r, "1.txt: done before\n2.txt: done before\n3.txt: 0.0 MB, 1 tokens");
}

/* The order of the files alone decides where ids are, not the threads: of files of many chunks, of
 * small ones, of one named twice, of one that an earlier run finished. */
PROCESS_TEST(tokenize_by_threads) {
    process_shell(room, 0,
                  "seq 400000 >a.txt; seq 250000 | sed 's/.*/{\"text\": \"&x\"}/' >b.jsonl; "
                  "gzip -k b.jsonl; for i in $(seq 40); do seq $i >c$i.txt; done; "
                  "seq 30000 >d.txt; cat d.txt c*.txt >all.txt; od -An -v -tu1 -w1 all.txt | tr -d "
                  "' ' >want");
    process_run(room, 0, "MLUA_THREADS=1",
                "tokenize bytes a.txt b.jsonl b.jsonl.gz a.txt -o one.idx "
                "--quiet");
    process_run(room, 0, "MLUA_THREADS=2",
                "tokenize bytes a.txt b.jsonl b.jsonl.gz a.txt -o two.idx "
                "--quiet");
    process_shell(room, 0, "cmp one.bin two.bin && cmp one.idx two.idx && ! ls | grep parts");
    process_run(room, 1, "", "tokenize bytes d.txt none.txt -o four.bin --quiet");
    process_shell(room, 0, "cp -r four.bin.parts three.bin.parts");
    process_result r = process_shell(room, 0,
                                     "MLUA_THREADS=4 $MLUA tokenize bytes d.txt c*.txt -o four.bin "
                                     "2>&1 | grep 'done before'");
    process_expect(&r, "d.txt");
    process_shell(room, 0,
                  "MLUA_THREADS=4 $MLUA tokenize bytes c*.txt d.txt -o three.bin --quiet; "
                  "od -An -v -tu2 -w2 four.bin | tr -d ' ' | cmp - want && "
                  "n=$(($(wc -c <d.txt) * 2)) && head -c $n four.bin >first && "
                  "tail -c $n three.bin | cmp - first && "
                  "[ $(wc -c <three.bin) = $(wc -c <four.bin) ]");
}

PROCESS_TEST(tokenize_trains) {
    process_write(room, "a.txt", "the cat and the dog and the bird\n");
    process_result r = process_run(room, 2, "", "tokenize --train 300 a.txt");
    process_expect(&r, "tokenize --train needs text files, and -o with the file to write");
    r = process_run(room, 1, "", "tokenize --train 99 a.txt -o t.json");
    process_expect(&r, "a trained tokenizer has 258 to");
    r = process_run(room, 0, "", "tokenize --train 260 a.txt -o t.json");
    process_expect(&r, "t.json: 260 tokens from 6 words");
    r = process_run(room, 0, "", "tokenize --train 260 a.txt -o t.json --json --quiet");
    process_expect(&r, "{\"bytes\":[104,101],\"count\":3}");
    process_write(room, "b.txt", "the the");
    r = process_run(room, 0, "", "tokenize t.json b.txt --json");
    process_expect(&r, "257");
}

/* The tokenizer that made a run's tokens is that of its weights: in the folder, in exports, for
 * prompts, and for the text of a training that begins with them. */
PROCESS_TEST(tokenizer_of_weights) {
    process_shell(room, 0,
                  "for i in $(seq 200); do printf 'the cat sat on the mat. '; done >t.txt");
    process_run(room, 0, "", "tokenize --train 270 t.txt -o own.json");
    process_result sampled =
        process_run(room, 0, "",
                    "run --device cpu --quiet \"$ROOT\"/models/llama.lua layers=1 embed=32 heads=2"
                    " kv_heads=2 ffn=64 seq=16 batch=8 steps=60 lr=0.01 vocab=270 data=t.txt"
                    " tokenizer=own.json sample=12 --out run");
    process_expect(&sampled, "local function");
    CHECK(!strpbrk(sampled.output, "0123456789")); /* as ids without a text are printed */
    process_run(room, 0, "", "export run out --hf --device cpu");
    process_shell(room, 0,
                  "cmp own.json run/tokenizer/tokenizer.json; cmp own.json out/tokenizer.json; "
                  "rm own.json");
    process_result of_run =
        process_run(room, 0, "", "generate --device cpu --from run --prompt 'the cat' --tokens 8");
    process_expect(&of_run, "the cat");
    process_expect(&of_run, " the ");
    process_result r =
        process_run(room, 0, "", "generate --device cpu --from out --prompt 'the cat' --tokens 8");
    CHECK_TEXT(r.output, of_run.output);
    /* Text appears while there is more to come, as far as its characters are whole. */
    process_shell(
        room, 0,
        ": >long.txt; $MLUA generate --device cpu --from run --prompt 'the cat' --tokens 10000000"
        " seq=1024 >long.txt 2>&1 & p=$!; i=0;"
        " while [ $(wc -c <long.txt) -lt 40 ] && [ $((i += 1)) -lt 200 ]; do sleep 0.1;"
        " done; kill $p; wait $p; [ $(wc -c <long.txt) -ge 40 ] && grep -q 'the cat' long.txt");
    r = process_run(room, 0, "",
                    "run --device cpu \"$ROOT\"/models/llama.lua --from out seq=16 batch=8 steps=1"
                    " data=t.txt sample=0 --json");
    CHECK(process_number(r.output, "\"loss\":") < 1.5); /* log 270 is 5.6 */
}
