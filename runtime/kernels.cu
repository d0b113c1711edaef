// Reductions and copies on a GPU, for every type that optcc has. `optcc.runtime.cupy_kernels.source` appends
// OPTCC_REDUCTION and OPTCC_TYPE lines, which make the kernels. Nothing is included, so that NVRTC needs no headers; a
// C++ compiler that is given the few names of CUDA used here compiles it for the processor, where it is tested.
//
// An element is handled as its bits. A type says how bits become a number to reckon with (`open`) and back (`close`):
// float16 and bfloat16 reckon in float and round once, to nearest even; integers reckon without sign, so that they wrap.
// Every parameter of a kernel is a pointer or an unsigned long long.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// --- arithmetic -----------------------------------------------------------------------------------------------------

// CuPy compiles with -ftz=true, by which C++ on floats takes subnormal numbers for zero. These instructions do not.
#ifdef __CUDA_ARCH__
#define OPTCC_FLOAT(NAME, INSTRUCTION)                                                                                \
    static __device__ float NAME(float a, float b) {                                                                  \
        float result;                                                                                                 \
        asm(INSTRUCTION " %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));                                              \
        return result;                                                                                                \
    }
#define OPTCC_COMPARE(NAME, INSTRUCTION)                                                                              \
    static __device__ bool NAME(float a, float b) {                                                                   \
        int result;                                                                                                   \
        asm("{ .reg .pred p; " INSTRUCTION " p, %1, %2; selp.s32 %0, 1, 0, p; }"                                      \
            : "=r"(result)                                                                                            \
            : "f"(a), "f"(b));                                                                                        \
        return result;                                                                                                \
    }
OPTCC_FLOAT(add, "add.rn.f32")
OPTCC_FLOAT(multiply, "mul.rn.f32")
OPTCC_FLOAT(quotient, "div.rn.f32")
OPTCC_COMPARE(below, "setp.lt.f32")
OPTCC_COMPARE(equal, "setp.eq.f32")
#endif

template <class Number>
static __device__ Number add(Number a, Number b) { return a + b; }
template <class Number>
static __device__ Number multiply(Number a, Number b) { return a * b; }
template <class Number>
static __device__ Number quotient(Number a, Number b) { return a / b; }
template <class Number>
static __device__ bool below(Number a, Number b) { return a < b; }
template <class Number>
static __device__ bool equal(Number a, Number b) { return a == b; }

// --- types ----------------------------------------------------------------------------------------------------------

struct float64 {
    typedef u64 bits;
    typedef double number;
    static const bool real = true;
    static __device__ number open(bits x) { return __longlong_as_double((long long)x); }
    static __device__ bits close(number x) { return (bits)__double_as_longlong(x); }
    static __device__ bool less(number a, number b) { return below(a, b); }
    static __device__ number divide(number a, u64 n) { return quotient(a, (double)n); }
};

struct float32 {
    typedef u32 bits;
    typedef float number;
    static const bool real = true;
    static __device__ number open(bits x) { return __uint_as_float(x); }
    static __device__ bits close(number x) { return __float_as_uint(x); }
    static __device__ bool less(number a, number b) { return below(a, b); }
    static __device__ number divide(number a, u64 n) { return quotient(a, (float)n); }
};

struct bfloat16 {
    typedef u16 bits;
    typedef float number;
    static const bool real = true;
    static __device__ number open(bits x) { return __uint_as_float((u32)x << 16); }
    static __device__ bits close(number x) {
        u32 raw = __float_as_uint(x);
        return !equal(x, x) ? (bits)0x7fc0 : (bits)((raw + 0x7fff + (raw >> 16 & 1)) >> 16);
    }
    static __device__ bool less(number a, number b) { return below(a, b); }
    static __device__ number divide(number a, u64 n) { return quotient(a, (float)n); }
};

struct float16 {
    typedef u16 bits;
    typedef float number;
    static const bool real = true;
#ifdef __CUDA_ARCH__  // one instruction each; what they do is what stands below
    static __device__ number open(bits x) {
        number wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
        return wide;
    }
    static __device__ bits close(number x) {
        bits narrow;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
        return narrow;
    }
#else
    static __device__ number open(bits x) {
        u32 magnitude = (u32)(x & 0x7fff) << 13, sign = (u32)(x & 0x8000) << 16;
        // The exponents differ by 112; the multiplication also gives subnormal numbers their leading one.
        u32 wide = __float_as_uint(__uint_as_float(magnitude) * 5.192296858534828e33f);
        if (magnitude >= 0x0f800000) wide |= 0x7f800000;  // infinite or no number
        return __uint_as_float(wide | sign);
    }
    static __device__ bits close(number x) {
        u32 raw = __float_as_uint(x), magnitude = raw & 0x7fffffff, narrow;
        if (magnitude > 0x7f800000) {
            narrow = 0x7fff;
        } else if (magnitude >= 0x477ff000) {  // from 65520 on it rounds to infinity
            narrow = 0x7c00;
        } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 rounds at 2^-24
            narrow = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000;
        } else {
            narrow = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
        }
        return (bits)(narrow | (raw >> 16 & 0x8000));
    }
#endif
    static __device__ bool less(number a, number b) { return below(a, b); }
    static __device__ number divide(number a, u64 n) { return quotient(a, (float)n); }
};

template <class Bits, class Number, class Signed>
struct integer {
    typedef Bits bits;
    typedef Number number;
    static const bool real = false;
    static __device__ number open(bits x) { return (number)x; }
    static __device__ bits close(number x) { return (bits)x; }
    static __device__ bool less(number a, number b) { return (Signed)a < (Signed)b; }
    static __device__ number divide(number a, u64 n) {
        // Divisions of 64 bits take a GPU longer than the memory that they are for; n is a number of ranks.
        if (sizeof(Bits) < 8) return (number)((int)(Signed)a / (int)n);
        return (number)((long long)(Signed)a / (long long)n);
    }
};

struct int8 : integer<u8, u32, signed char> {};
struct uint8 : integer<u8, u32, u8> {};
struct int32 : integer<u32, u32, int> {};
struct int64 : integer<u64, u64, long long> {};

// --- reductions -----------------------------------------------------------------------------------------------------

struct sum {
    template <class T>
    static __device__ typename T::bits step(typename T::bits a, typename T::bits b) {
        return T::close(add(T::open(a), T::open(b)));
    }
};

struct prod {
    template <class T>
    static __device__ typename T::bits step(typename T::bits a, typename T::bits b) {
        return T::close(multiply(T::open(a), T::open(b)));
    }
};

// Two zeros are equal and differ in the sign bit: the lower has it if one of them has, the upper if both have.
struct min_ {
    template <class T>
    static __device__ typename T::bits step(typename T::bits a, typename T::bits b) {
        typename T::number x = T::open(a), y = T::open(b);
        if (T::real && equal(x, y)) return a | b;
        return T::less(x, y) || !equal(x, x) ? a : b;
    }
};

struct max_ {
    template <class T>
    static __device__ typename T::bits step(typename T::bits a, typename T::bits b) {
        typename T::number x = T::open(a), y = T::open(b);
        if (T::real && equal(x, y)) return a & b;
        return T::less(y, x) || !equal(x, x) ? a : b;
    }
};

struct band {
    template <class T>
    static __device__ typename T::bits step(typename T::bits a, typename T::bits b) { return a & b; }
};

struct bor {
    template <class T>
    static __device__ typename T::bits step(typename T::bits a, typename T::bits b) { return a | b; }
};

struct bxor {
    template <class T>
    static __device__ typename T::bits step(typename T::bits a, typename T::bits b) { return a ^ b; }
};

// --- passes over memory -----------------------------------------------------------------------------------------------

#define OPTCC_VECTOR 16  // bytes of the widest load and store

template <class Bits>
union vector {
    uint4 all;
    Bits each[OPTCC_VECTOR / sizeof(Bits)];
};

// `count` elements as `head` single ones up to the first vector of dst, `vectors`, and single ones again. Where another
// operand is not aligned as dst is, all are single.
struct split {
    u64 head, vectors, singles;

    __device__ split(u64 address, u64 differences, u64 count, u64 size) {
        head = (OPTCC_VECTOR - address % OPTCC_VECTOR) % OPTCC_VECTOR / size;
        if (differences % OPTCC_VECTOR || head > count) head = count;
        vectors = (count - head) / (OPTCC_VECTOR / size);
        singles = count - vectors * (OPTCC_VECTOR / size);
    }
    template <class Bits>
    __device__ u64 single(u64 k) const {  // the place of the k-th single element
        return k < head ? k : k + vectors * (OPTCC_VECTOR / sizeof(Bits));
    }
};

__device__ inline u64 first_item() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline u64 item_step() { return (u64)gridDim.x * blockDim.x; }

// dst = dst op src; the same into out too, if there is one.
template <class T, class Op, bool Forward>
__device__ void reduce(typename T::bits* dst, const typename T::bits* src, typename T::bits* out, u64 count) {
    typedef typename T::bits Bits;
    const int lanes = OPTCC_VECTOR / sizeof(Bits);
    u64 differences = ((u64)dst ^ (u64)src) | (Forward ? (u64)dst ^ (u64)out : 0);
    const split part((u64)dst, differences, count, sizeof(Bits));
    for (u64 k = first_item(); k < part.vectors; k += item_step()) {
        u64 place = part.head + k * lanes;
        vector<Bits> own, other;
        own.all = *(const uint4*)(dst + place);
        other.all = *(const uint4*)(src + place);
        for (int lane = 0; lane < lanes; ++lane)
            own.each[lane] = Op::template step<T>(own.each[lane], other.each[lane]);
        *(uint4*)(dst + place) = own.all;
        if (Forward) *(uint4*)(out + place) = own.all;
    }
    for (u64 k = first_item(); k < part.singles; k += item_step()) {
        u64 place = part.single<Bits>(k);
        Bits own = Op::template step<T>(dst[place], src[place]);
        dst[place] = own;
        if (Forward) out[place] = own;
    }
}

template <class Bits>
__device__ void copy(Bits* dst, const Bits* src, u64 count) {
    const int lanes = OPTCC_VECTOR / sizeof(Bits);
    const split part((u64)dst, (u64)dst ^ (u64)src, count, sizeof(Bits));
    for (u64 k = first_item(); k < part.vectors; k += item_step()) {
        u64 place = part.head + k * lanes;
        *(uint4*)(dst + place) = *(const uint4*)(src + place);
    }
    for (u64 k = first_item(); k < part.singles; k += item_step()) {
        u64 place = part.single<Bits>(k);
        dst[place] = src[place];
    }
}

template <class T>
__device__ void divide(typename T::bits* data, u64 n, u64 count) {
    typedef typename T::bits Bits;
    const int lanes = OPTCC_VECTOR / sizeof(Bits);
    const split part((u64)data, 0, count, sizeof(Bits));
    for (u64 k = first_item(); k < part.vectors; k += item_step()) {
        vector<Bits> own;
        own.all = *(const uint4*)(data + part.head + k * lanes);
        for (int lane = 0; lane < lanes; ++lane) own.each[lane] = T::close(T::divide(T::open(own.each[lane]), n));
        *(uint4*)(data + part.head + k * lanes) = own.all;
    }
    for (u64 k = first_item(); k < part.singles; k += item_step()) {
        u64 place = part.single<Bits>(k);
        data[place] = T::close(T::divide(T::open(data[place]), n));
    }
}

// --- kernels ----------------------------------------------------------------------------------------------------------

// batch: row r of the table, which is in page-locked memory, is one step: where it writes, what it reads, where it
// writes the result too (0: nowhere), how many elements, and 1 to reduce or 0 to copy. The grid's second number is r.
#define OPTCC_REDUCTION(T, Op, NAME)                                                                                  \
    extern "C" __global__ void reduce_##NAME(T::bits* dst, const T::bits* src, u64 count) {                           \
        reduce<T, Op, false>(dst, src, 0, count);                                                                     \
    }                                                                                                                 \
    extern "C" __global__ void forward_##NAME(T::bits* dst, const T::bits* src, T::bits* out, u64 count) {            \
        reduce<T, Op, true>(dst, src, out, count);                                                                    \
    }                                                                                                                 \
    extern "C" __global__ void batch_##NAME(const u64* table) {                                                       \
        const u64* row = table + 5 * blockIdx.y;                                                                      \
        T::bits *dst = (T::bits*)row[0], *out = (T::bits*)row[2];                                                     \
        const T::bits* src = (const T::bits*)row[1];                                                                  \
        if (row[4]) {                                                                                                 \
            if (out) reduce<T, Op, true>(dst, src, out, row[3]);                                                      \
            else reduce<T, Op, false>(dst, src, 0, row[3]);                                                           \
        } else {                                                                                                      \
            copy(dst, src, row[3]);                                                                                   \
            if (out) copy(out, src, row[3]);                                                                          \
        }                                                                                                             \
    }

#define OPTCC_TYPE(T)                                                                                                 \
    extern "C" __global__ void copy_##T(T::bits* dst, const T::bits* src, u64 count) { copy(dst, src, count); }       \
    extern "C" __global__ void divide_##T(T::bits* data, u64 n, u64 count) { divide<T>(data, n, count); }
