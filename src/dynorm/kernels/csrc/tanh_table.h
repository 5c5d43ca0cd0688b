// tanh by table: by tools/kernel_coefficients.py.
#pragma once

// Between nodes that lie closer where tanh bends, tanh(node + d) is a polynomial in d. Row k has the coefficient of d^k
// for the four last bits of (1 + |z|)'s exponent and two bits of its mantissa; the last two nodes are at the bound.
alignas(64) constexpr float kTanhTable[7][16] = {
    {0x1.85efacp-1f, 0x1.cf6f98p-1f, 0x1.ed9506p-1f, 0x1.f92582p-1f, 0x1.fd77d2p-1f, 0x1.ffa818p-1f, 0x1.fff41ap-1f,
     0x1.fffe64p-1f, 0x1.ffffc8p-1f, 0x1.fffffep-1f, 1, 1, 0, 0x1.f597eap-3f, 0x1.d9353ep-2f, 0x1.45323ep-1f},
    {0x1.ae0d12p-2f, 0x1.72155cp-3f, 0x1.21623ep-4f, 0x1.b3b6a4p-6f, 0x1.433794p-7f, 0x1.5ef7ecp-10f, 0x1.7a1a0cp-13f,
     0x1.907fe8p-16f, 0x1.da5722p-19f, 0x1.299c54p-20f, 0, 0, 1, 0x1.e149c2p-1f, 0x1.92a8f4p-1f, 0x1.317414p-1f},
    {-0x1.4778fcp-2f, -0x1.4ee7f8p-3f, -0x1.16ee2ap-4f, -0x1.ae779p-6f, -0x1.40bac2p-7f, -0x1.58b0dcp-10f,
     -0x1.5d14fap-13f, -0x1.12547cp-16f, -0x1.2f2404p-18f, -0x1.9dc4b6p-18f, 0, 0, -0x1.268c0cp-20f, -0x1.d79bb8p-3f,
     -0x1.740788p-2f, -0x1.84280cp-2f},
    {0x1.a6e3dp-4f, 0x1.669a5cp-4f, 0x1.583814p-5f, 0x1.1c0ce6p-6f, 0x1.9f3058p-8f, 0x1.99e1b6p-11f, 0x1.d73b9cp-15f,
     -0x1.3a45ep-16f, 0x1.3ade1p-18f, 0x1.b60082p-17f, 0, 0, -0x1.5544c8p-2f, -0x1.06328ap-2f, -0x1.8aadap-4f,
     0x1.69ebeap-5f},
    {0x1.d4f678p-6f, -0x1.8e0f06p-6f, -0x1.1ffa8ep-6f, -0x1.2f25bp-7f, -0x1.7389aap-9f, -0x1.d214eap-13f,
     0x1.1429d8p-14f, 0x1.f47088p-15f, -0x1.c5e0a8p-19f, -0x1.a56d2ep-17f, 0, 0, -0x1.36518ap-10f, 0x1.0f66ap-3f,
     0x1.74f3a2p-3f, 0x1.4def18p-4f},
    {-0x1.7df832p-5f, -0x1.48a2b4p-9f, 0x1.1def0ap-8f, 0x1.44291p-8f, 0x1.a3b556p-11f, -0x1.4cc3eep-15f,
     -0x1.7c3a2p-14f, -0x1.e101a6p-15f, 0x1.65a844p-20f, 0x1.76377p-18f, 0, 0, 0x1.250988p-3f, 0x1.931c0cp-4f,
     -0x1.7f6718p-4f, -0x1.34f3cp-11f},
    {0x1.25c784p-6f, 0x1.04b162p-8f, -0x1.0fc73ep-12f, -0x1.08b23ep-9f, -0x1.ae368p-14f, 0x1.2eb052p-15f,
     0x1.176134p-15f, 0x1.477f12p-16f, -0x1.c2b15p-23f, -0x1.f2a03ap-21f, 0, 0, -0x1.2eebcp-5f, -0x1.b58678p-4f,
     0x1.b40b0ap-5f, -0x1.3e9f74p-4f},
};
