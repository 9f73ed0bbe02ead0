// Gated activations, as the kernel of their own and products that gate what they give compute them.
#pragma once
#include "common.cuh"

// Which activation: numbered as the host counts them.
#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define SWIGLU_CLAMPED 3

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// act(gate) * up. All but one are gate * sigmoid(z) with one z or another, as a quotient, so that a large negative gate
// gives zero and not a product with infinity. What is rounded to sixteen bits anyway takes the short division. The error
// function is long and rarely asked for: only the paths that take value by value have it.
template <bool EXACT, bool WITH_ERF> DEVICE float gated(int activation, float alpha, float limit, float gate, float up) {
    if (WITH_ERF && activation == GELU)
        return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    float z = gate;
    if (activation == GELU_TANH) z = 1.5957691216057308f * fmaf(gate * gate * gate, 0.044715f, gate);
    if (activation == SWIGLU_CLAMPED) {
        // Comparisons that keep what is not a number.
        gate = gate > limit ? limit : gate;
        up = (up > limit ? limit : up < -limit ? -limit : up) + 1.0f;
        z = alpha * gate;
    }
    float below = 1.0f + expf(-z);
    return (EXACT ? gate / below : __fdividef(gate, below)) * up;
}
