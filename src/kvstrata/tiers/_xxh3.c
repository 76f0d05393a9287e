/* Checksums with the instructions that every processor has. */
#define DIGEST digest_baseline
#include "_xxh3_body.h"

void checksum_bytes(const void *bytes, size_t count, unsigned char *checksum)
{
    XXH64_hash_t hash = XXH3_64bits(bytes, count);

    for (int i = 0; i < 8; i++)
        checksum[i] = (unsigned char)(hash >> (8 * i));
}
