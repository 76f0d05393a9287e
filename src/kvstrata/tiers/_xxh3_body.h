/* One digester, for the instructions of the file that includes this; its name is DIGEST. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "_xxh3.h"

static XXH128_hash_t hash_parts(const struct iovec *part, size_t num_bytes)
{
    XXH3_state_t state;

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    for (; num_bytes > 0; part++) {
        size_t count = part->iov_len < num_bytes ? part->iov_len : num_bytes;
        XXH3_128bits_update(&state, part->iov_base, count);
        num_bytes -= count;
    }
    return XXH3_128bits_digest(&state);
}

void DIGEST(const struct iovec *parts, size_t num_bytes, unsigned char *digest)
{
    XXH128_canonical_t canonical;
    XXH128_hash_t hash;

    if (num_bytes > 0 && parts[0].iov_len >= num_bytes)
        hash = XXH3_128bits(parts[0].iov_base, num_bytes);
    else
        hash = hash_parts(parts, num_bytes);
    XXH128_canonicalFromHash(&canonical, hash);
    memcpy(digest, canonical.digest, DIGEST_BYTES);
}
