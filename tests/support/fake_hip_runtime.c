// Stands in for libamdhip64: notes launches and allocations, runs nothing.
#include <stdlib.h>

typedef struct { unsigned x, y, z; } dim3;
unsigned fake_grid[3], fake_threads;
int fake_launches, fake_live;
float fake_last_float;
void *fake_stream;

int hipLaunchKernel(const void *kernel, dim3 grid, dim3 threads, void **arguments, unsigned long shared, void *stream) {
  fake_grid[0] = grid.x, fake_grid[1] = grid.y, fake_grid[2] = grid.z;
  fake_threads = threads.x, fake_stream = stream;
  ++fake_launches;
  if (grid.z > 1) fake_last_float = *(float *)arguments[9];  // the forward alone has a batch, and ten arguments
  return kernel == 0 || shared != 0;
}
int hipMallocAsync(void **memory, unsigned long bytes, void *stream) { return ++fake_live, (*memory = malloc(bytes)) == 0; }
int hipFreeAsync(void *memory, void *stream) { return --fake_live, free(memory), 0; }
int __hipPopCallConfiguration(dim3 *grid, dim3 *threads, unsigned long *shared, void **stream) { return 0; }
void **__hipRegisterFatBinary(const void *data) { static void *handle; return &handle; }
void __hipRegisterFunction() {}
void __hipUnregisterFatBinary(void **handle) {}
