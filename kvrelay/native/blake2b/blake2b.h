/* BLAKE2b-128 chained over the blocks of a prompt. */

#ifndef KVRELAY_BLAKE2B_H
#define KVRELAY_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>

#define DIGEST_BYTES 16

/* out: 16 bytes for each of num_blocks blocks of `width` bytes of tokens, chained from `parent` (16 bytes). */
void kr_chain(const uint8_t *parent, const uint8_t *tokens, size_t width, size_t num_blocks, uint8_t *out);

#endif
