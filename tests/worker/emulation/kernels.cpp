// Runs a library of CPU kernels for another process: a library for aarch64 runs under qemu beside Python on another machine.
//
// Requests on stdin, answers on stdout, all of 64-bit words but for names and contents:
//   'P' type terms n k                         -> packed size
//   'R' words, graph; regions, each: address, bytes, contents
//                                              -> status, message [200]; changed regions, each: number, contents
// The graph and tables of addresses have the other process's addresses. Each region ends where memory ends.

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct Kernel {
    const char *name, *types, *parameters;
    void* call;
};

struct Region {
    int64_t address, size;
    char *memory, *mapping;
    int64_t mapped;
    std::vector<char> before;
};

void read_all(void* to, size_t size) {
    if (size && fread(to, 1, size, stdin) != size) exit(0);  // the other process has ended
}
int64_t read_word() {
    int64_t word;
    read_all(&word, sizeof word);
    return word;
}
void write_all(const void* from, size_t size) { fwrite(from, 1, size, stdout); }
void write_word(int64_t word) { write_all(&word, sizeof word); }
void write_text(const char* text) { write_all(text, strlen(text) + 1); }

void* find(void* library, const char* name) {
    void* symbol = dlsym(library, name);
    if (!symbol) fprintf(stderr, "%s\n", dlerror()), exit(1);
    return symbol;
}

Region read_region() {
    const int64_t page = sysconf(_SC_PAGESIZE);
    Region region{};
    region.address = read_word(), region.size = read_word();
    region.mapped = (region.size + page - 1) / page * page + page;
    region.mapping = (char*)mmap(nullptr, region.mapped, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (region.mapping == MAP_FAILED) perror("mmap"), exit(1);
    mprotect(region.mapping + region.mapped - page, page, PROT_NONE);
    region.memory = region.mapping + region.mapped - page - region.size;
    read_all(region.memory, region.size);
    region.before.assign(region.memory, region.memory + region.size);
    return region;
}

// An address of the other process here; what is in no region stays.
int64_t translate(const std::vector<Region>& regions, int64_t address) {
    for (const Region& region : regions)
        if (address >= region.address && address < region.address + region.size)
            return int64_t(region.memory) + address - region.address;
    return address;
}

int main(int, char** arguments) {
    void* const library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    const auto run =
        (int (*)(const int64_t*, int64_t, char*, int64_t))find(library, "servd_run");
    const auto packed_size =
        (int64_t(*)(int, int, int64_t, int64_t))find(library, "servd_packed_size");
    const auto is_usable = (int (*)())find(library, "servd_is_usable");
    const auto* const table = (const Kernel*)find(library, "servd_kernel_table");
    const int num_kernels = *(const int*)find(library, "servd_num_kernels");
    write_word(is_usable());
    write_word(num_kernels);
    for (int i = 0; i < num_kernels; i++)
        write_text(table[i].name), write_text(table[i].types), write_text(table[i].parameters);
    for (;;) {
        fflush(stdout);
        char request;
        read_all(&request, 1);
        if (request == 'P') {
            const int type = int(read_word()), terms = int(read_word());
            const int64_t n = read_word(), k = read_word();
            write_word(packed_size(type, terms, n, k));
            continue;
        }
        std::vector<int64_t> graph(read_word());
        read_all(graph.data(), graph.size() * sizeof(int64_t));
        std::vector<Region> regions(read_word());
        for (Region& region : regions) region = read_region();
        std::vector<Region*> tables;
        for (size_t i = 0; i < graph.size();) {
            const char* const types = table[graph[i++]].types;
            for (const char* type = types; *type; type++, i++) {
                if (strchr("iqf", *type)) continue;
                if (*type == 'A')
                    for (Region& region : regions)
                        if (region.address == graph[i]) tables.push_back(&region);
                graph[i] = translate(regions, graph[i]);
            }
        }
        for (Region* region : tables) {
            auto* const addresses = (int64_t*)region->memory;
            for (size_t i = 0; i < region->size / sizeof(int64_t); i++)
                addresses[i] = translate(regions, addresses[i]);
        }
        char message[200] = {};
        write_word(run(graph.data(), int64_t(graph.size()), message, sizeof message));
        write_all(message, sizeof message);
        for (Region* region : tables) memcpy(region->memory, region->before.data(), region->size);
        int64_t num_changed = 0;
        for (const Region& region : regions)
            num_changed += memcmp(region.memory, region.before.data(), region.size) != 0;
        write_word(num_changed);
        for (size_t i = 0; i < regions.size(); i++) {
            const Region& region = regions[i];
            if (memcmp(region.memory, region.before.data(), region.size)) {
                write_word(int64_t(i));
                write_all(region.memory, region.size);
            }
            munmap(region.mapping, region.mapped);
        }
    }
}
