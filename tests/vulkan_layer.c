// A Vulkan layer between a program and its driver: it counts what is asked of the GPU, loses the device when told to, and
// calls GPUs what a test wants. tests/vulkan_layer.py compiles it; the numbers are those of Vulkan's headers.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*Function)(void);
typedef Function (*Find)(void *of, const char *name);

typedef struct Link { // where the next layer's functions are found, or the driver's
    struct Link *next;
    Find of_instance, of_device;
} Link;

typedef struct Made { // the beginning of what something is made from, and of what is chained to that
    int kind;
    struct Made *next;
    int what;
    Link *link;
} Made;

typedef struct {
    int kind;
    void *next;
    uint32_t version;
    Find of_instance, of_device, of_physical_device;
} Interface;

typedef struct {
    char name[256];
    uint32_t version;
} Extension;

typedef struct Told { // the beginning of what something is told in, and of what is chained to that
    int kind;
    struct Told *next;
    uint32_t numbers[4];
} Told;

enum { LOADER_INSTANCE = 47, LOADER_DEVICE = 48, LINK = 0, DEVICE_LOST = -4, INITIALIZATION_FAILED = -3 };
enum { MOST = 8, INCOMPLETE = 5, BUS_INFO = 1000212000 };

struct Counts { // in the order of tests/vulkan_layer.py
    uint64_t submits, dispatches, copies, fills, waits;
} counts;
int opened = -1; // which of the GPUs, in the driver's order

static Find of_instance, of_device;
static void *gpus[MOST];
static uint32_t gpu_count;

// The driver's functions, looked up as something is made: later the loader would give those of this layer.
static int (*next_submit)(void *, uint32_t, const void *, uint64_t);
static void (*next_dispatch)(void *, uint32_t, uint32_t, uint32_t);
static void (*next_copy)(void *, uint64_t, uint64_t, uint32_t, const void *);
static void (*next_fill)(void *, uint64_t, uint64_t, uint64_t, uint32_t);
static int (*next_wait_for)(void *, uint32_t, const void *, uint32_t, uint64_t);
static int (*next_enumerate)(void *, uint32_t *, void **);
static int (*next_extensions)(void *, const char *, uint32_t *, Extension *);
static void (*next_properties)(void *, uint32_t *);
static void (*next_properties2)(void *, Told *);
static int (*next_create_device)(void *, Made *, const void *, void **);

static int is_lost(void) {
    const char *path = getenv("MOTLEY_TEST_LOST_GPU");
    return path && !access(path, F_OK);
}

static int submit(void *queue, uint32_t count, const void *what, uint64_t fence) {
    counts.submits++;
    if (is_lost())
        return DEVICE_LOST;
    return next_submit(queue, count, what, fence);
}

static void dispatch(void *commands, uint32_t x, uint32_t y, uint32_t z) {
    counts.dispatches++;
    next_dispatch(commands, x, y, z);
}

static void copy(void *commands, uint64_t from, uint64_t to, uint32_t count, const void *regions) {
    counts.copies++;
    next_copy(commands, from, to, count, regions);
}

static void fill(void *commands, uint64_t buffer, uint64_t begin, uint64_t size, uint32_t value) {
    counts.fills++;
    next_fill(commands, buffer, begin, size, value);
}

static int wait_for(void *of, uint32_t count, const void *fences, uint32_t all, uint64_t nanoseconds) {
    counts.waits++;
    return next_wait_for(of, count, fences, all, nanoseconds);
}

static int number_of(void *gpu) {
    for (uint32_t each = 0; each < gpu_count; each++)
        if (gpus[each] == gpu)
            return (int)each;
    return -1;
}

static int enumerate(void *of, uint32_t *count, void **found) {
    int failed = next_enumerate(of, count, found);
    if (found && *count <= MOST) {
        gpu_count = *count;
        memcpy(gpus, found, *count * sizeof *found);
    }
    return failed;
}

// Each GPU is on a bus of its own, 1 and so on, as software drivers have none.
static void put_on_bus(void *gpu, Told *told) {
    for (Told *each = told->next; each; each = each->next)
        if (each->kind == BUS_INFO)
            memcpy(each->numbers, (uint32_t[]){0, (uint32_t)number_of(gpu) + 1, 0, 0}, sizeof each->numbers);
}

static int extensions(void *gpu, const char *of_layer, uint32_t *count, Extension *found) {
    uint32_t room = *count;
    int failed = next_extensions(gpu, of_layer, count, found);
    if (failed || of_layer)
        return failed;
    if (found && room <= *count)
        return INCOMPLETE;
    if (found)
        found[*count] = (Extension){"VK_EXT_pci_bus_info", 2};
    ++*count;
    return 0;
}

// A device's kind is the fifth number of its properties; MOTLEY_TEST_GPU_KINDS has a digit for each GPU.
static void call_it(void *gpu, uint32_t *properties) {
    const char *kinds = getenv("MOTLEY_TEST_GPU_KINDS");
    int number = number_of(gpu);
    if (kinds && number >= 0 && number < (int)strlen(kinds))
        properties[4] = (uint32_t)(kinds[number] - '0');
}

static void properties(void *gpu, uint32_t *told) {
    next_properties(gpu, told);
    call_it(gpu, told);
}

static void properties2(void *gpu, Told *told) {
    next_properties2(gpu, told);
    call_it(gpu, told->numbers);
    put_on_bus(gpu, told);
}

static Link *next_link(Made *from, int kind) {
    for (Made *each = from->next; each; each = each->next)
        if (each->kind == kind && each->what == LINK) {
            Link *link = each->link;
            each->link = link->next;
            return link;
        }
    return NULL;
}

// void pointers, as functions of every type come as one.
#define FIND(find, of, name) ((void *)(find)(of, name))

static int create_instance(Made *from, const void *allocator, void **made) {
    Link *link = next_link(from, LOADER_INSTANCE);
    if (!link)
        return INITIALIZATION_FAILED;
    of_instance = link->of_instance;
    int (*create)(Made *, const void *, void **) = FIND(of_instance, NULL, "vkCreateInstance");
    int failed = create(from, allocator, made);
    if (!failed) {
        next_enumerate = FIND(of_instance, *made, "vkEnumeratePhysicalDevices");
        next_extensions = FIND(of_instance, *made, "vkEnumerateDeviceExtensionProperties");
        next_properties = FIND(of_instance, *made, "vkGetPhysicalDeviceProperties");
        next_properties2 = FIND(of_instance, *made, "vkGetPhysicalDeviceProperties2");
        next_create_device = FIND(of_instance, *made, "vkCreateDevice");
    }
    return failed;
}

static int create_device(void *gpu, Made *from, const void *allocator, void **made) {
    Link *link = next_link(from, LOADER_DEVICE);
    if (!link)
        return INITIALIZATION_FAILED;
    of_device = link->of_device;
    int failed = next_create_device(gpu, from, allocator, made);
    if (!failed) {
        next_submit = FIND(of_device, *made, "vkQueueSubmit");
        next_dispatch = FIND(of_device, *made, "vkCmdDispatch");
        next_copy = FIND(of_device, *made, "vkCmdCopyBuffer");
        next_fill = FIND(of_device, *made, "vkCmdFillBuffer");
        next_wait_for = FIND(of_device, *made, "vkWaitForFences");
        opened = number_of(gpu);
    }
    return failed;
}

static Function find_in_instance(void *of, const char *name);
static Function find_in_device(void *of, const char *name);

static const struct {
    const char *name;
    Function function;
} of_instances[] = {
    {"vkGetInstanceProcAddr", (Function)find_in_instance},
    {"vkCreateInstance", (Function)create_instance},
    {"vkCreateDevice", (Function)create_device},
    {"vkEnumeratePhysicalDevices", (Function)enumerate},
    {"vkEnumerateDeviceExtensionProperties", (Function)extensions},
    {"vkGetPhysicalDeviceProperties", (Function)properties},
    {"vkGetPhysicalDeviceProperties2", (Function)properties2},
    {"vkGetPhysicalDeviceProperties2KHR", (Function)properties2},
}, of_devices[] = {
    {"vkGetDeviceProcAddr", (Function)find_in_device},
    {"vkQueueSubmit", (Function)submit},
    {"vkCmdDispatch", (Function)dispatch},
    {"vkCmdCopyBuffer", (Function)copy},
    {"vkCmdFillBuffer", (Function)fill},
    {"vkWaitForFences", (Function)wait_for},
};

static Function find_in_device(void *of, const char *name) {
    for (size_t each = 0; each < sizeof of_devices / sizeof *of_devices; each++)
        if (!strcmp(name, of_devices[each].name))
            return of_devices[each].function;
    return of_device(of, name);
}

static Function find_in_instance(void *of, const char *name) {
    for (size_t each = 0; each < sizeof of_instances / sizeof *of_instances; each++)
        if (!strcmp(name, of_instances[each].name))
            return of_instances[each].function;
    for (size_t each = 0; each < sizeof of_devices / sizeof *of_devices; each++)
        if (!strcmp(name, of_devices[each].name))
            return of_devices[each].function;
    return of_instance ? of_instance(of, name) : NULL;
}

// What the loader asks first.
int vkNegotiateLoaderLayerInterfaceVersion(Interface *agreed) {
    if (agreed->version > 2)
        agreed->version = 2;
    agreed->of_instance = find_in_instance;
    agreed->of_device = find_in_device;
    agreed->of_physical_device = NULL;
    return 0;
}
