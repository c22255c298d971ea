// A struct of arguments as the host has it, for Python's mirror of it to be compared with
// (declaration.py): EXPORT_LAYOUT(Args, FIELD(rows), FIELD(scale))
#pragma once

#include <cstddef>
#include <cstdint>

struct AsyncllmField {
    const char* name;  // of the last one "sizeof": its size is the struct's
    uint64_t offset, size;
};
#define FIELD(name) {#name, offsetof(Described, name), sizeof(Described::name)}
#define EXPORT_LAYOUT(STRUCT, ...)                                                                      \
    extern "C" const AsyncllmField* asyncllm_layout_##STRUCT() {                                        \
        using Described = STRUCT;                                                                       \
        static const AsyncllmField fields[] = {__VA_ARGS__, {"sizeof", 0, sizeof(STRUCT)}};             \
        return fields;                                                                                  \
    }
