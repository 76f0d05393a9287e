/* Checksums: xxh3, of a payload with the instructions that this processor has. */
#ifndef KVSTRATA_XXH3_H
#define KVSTRATA_XXH3_H

#include <stddef.h>
#include <sys/uio.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVSTRATA_AVX2 1 /* this compiler can be told within a file to use AVX2 */
#endif

enum { DIGEST_BYTES = 16 };

/* Digests the first `num_bytes` bytes of some parts, which have as many. */
typedef void Digester(const struct iovec *parts, size_t num_bytes, unsigned char *digest);

Digester digest_baseline;
#ifdef KVSTRATA_AVX2
Digester digest_avx2; /* from memory as fast as with AVX-512, and 1.5 times as fast as with SSE2 */
#endif

/* The 64 bits of a header's checksum, little-endian. */
void checksum_bytes(const void *bytes, size_t count, unsigned char *checksum);

#endif
