// Shared memory by its 32-bit addresses, and matrices from there into registers.
#pragma once
#include "common.cuh"

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Four 8x8 matrices of 16-bit values. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes a row). In registers
// lane l holds row l / 4, columns l % 4 * 2 and the next.
DEVICE void load_matrices(u32 (&out)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}
