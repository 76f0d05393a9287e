/* The checksum with AVX2, for processors that have it. */
#include "_xxh3.h"
#ifdef KVSTRATA_AVX2
#pragma GCC target("avx2")
#define DIGEST digest_avx2
#include "_xxh3_body.h"
#endif
