// Three small kernels by which the driver layer tests itself; no step runs them.
#include "common.cuh"

// out[i] = x[i] * scale + shift, one thread an element.
extern "C" __global__ void probe_scale(float* out, const float* x, float scale, float shift, i32 count) {
    release_next();
    wait_for_previous();
    i32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) out[index] = x[index] * scale + shift;
}

// Sum of a block's inputs, through all the dynamic shared memory it was given.
extern "C" __global__ void probe_shared(float* out, const float* x, i32 count) {
    extern __shared__ float held[];
    release_next();
    wait_for_previous();
    for (i32 index = threadIdx.x; index < count; index += blockDim.x) held[index] = x[index];
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (i32 index = 0; index < count; index++) sum += held[index];
        *out = sum;
    }
}

// Writes where nothing is: what a broken kernel does to its device.
extern "C" __global__ void probe_fault(u64 address) {
    wait_for_previous();
    *(volatile u32*)address = 1;
}
